"""A module that asks at import whether there is a GPU, as some packages do: G2's images have it."""

import os
import threading

import torch

match os.environ.get("PERDURE_GPU_ASKS"):
    case "count":
        torch.cuda.device_count()
    case "available":
        torch.cuda.is_available()
    case "thread":  # Where there is no GPU: what an image may not have either.
        threading.Thread(target=threading.Event().wait, daemon=True).start()
