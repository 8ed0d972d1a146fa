"""What ranks are asked to do at one step, all of them or none.

`boundary` asks, commits and aborts; `changes` and `pauses` are what is agreed upon. What is
remembered of them is in `control/promises.py`.
"""
