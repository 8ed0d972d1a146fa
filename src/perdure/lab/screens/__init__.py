"""Traces, simulations and live replays as text, as SVG and as pages."""
