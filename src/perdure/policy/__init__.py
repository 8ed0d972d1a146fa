"""Verdict, history and budget in, decision with its reason out."""
