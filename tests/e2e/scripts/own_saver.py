"""Saves its own checkpoint at every step, slowly, and begins at the newest that it finds.

It loads without a second thought, as most scripts do: a torn newest one ends it.
Arguments: the format, the folder. `trail` says what each life did.
"""

import glob
import io
import json
import os
import re
import sys
import time

import torch
import torch.distributed.checkpoint as dcp

FORM, OUT = sys.argv[1:3]
PIECES = 4


def tell(*words: object) -> None:
    fd = os.open("trail", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    os.close(fd)


def write(path: str, data: bytes) -> None:
    """Write as slowly as a large file takes."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb", buffering=0) as file:
        piece = len(data) // PIECES + 1
        for at in range(0, len(data), piece):
            file.write(data[at : at + piece])
            time.sleep(0.02)


def pack(step: int) -> bytes:
    buffer = io.BytesIO()
    torch.save({"step": step, "w": torch.full((256,), float(step))}, buffer)
    return buffer.getvalue()


def pack_tensors(step: int) -> bytes:
    data = torch.full((256,), float(step)).numpy().tobytes()
    info = {"w": {"dtype": "F32", "shape": [256], "data_offsets": [0, len(data)]}}
    header = json.dumps(info).encode()
    return len(header).to_bytes(8, "little") + header + data


def unpack_tensors(path: str) -> int:
    with open(path, "rb") as file:
        data = file.read()
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])["w"]["data_offsets"]
    values = torch.frombuffer(bytearray(data[8 + length :][begin:end]), dtype=torch.float32)
    assert len(values) == 256, f"incomplete metadata in {path}"
    return int(values[0])


def save(step: int) -> None:
    if FORM in ("torch", "lightning", "overwritten"):
        name = {"torch": f"ckpt-{step:05}.pt", "lightning": f"epoch=0-step={step}.ckpt"}
        write(f"{OUT}/{name.get(FORM, 'ckpt.pt')}", pack(step))
    elif FORM == "safetensors":
        write(f"{OUT}/{step:06}.safetensors", pack_tensors(step))
    elif FORM == "trainer":
        folder = f"{OUT}/checkpoint-{step}"
        write(f"{folder}/config.json", b'{"model_type": "x"}')
        write(f"{folder}/model.safetensors", pack_tensors(step))
        write(f"{folder}/training_args.bin", pack(step))
        write(f"{folder}/optimizer.pt", pack(step))
        write(f"{folder}/trainer_state.json", json.dumps({"global_step": step}).encode())
    elif FORM == "deepspeed":
        for part in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            write(f"{OUT}/global_step{step}/{part}", pack(step))
        write(f"{OUT}/latest", f"global_step{step}".encode())
    elif FORM == "dcp":
        dcp.save({"w": torch.full((256,), float(step))}, checkpoint_id="staged", no_dist=True)
        for name in ("__0_0.distcp", ".metadata"):
            with open(f"staged/{name}", "rb") as file:
                write(f"{OUT}/step-{step}/{name}", file.read())


def load() -> int:
    paths = glob.glob(f"{OUT}/*") if FORM != "deepspeed" else []
    path = max(paths, key=lambda p: (int((re.findall(r"\d+", p) or [0])[-1]), p), default="")
    if FORM == "deepspeed" and os.path.exists(f"{OUT}/latest"):
        with open(f"{OUT}/latest") as file:
            path = f"{OUT}/{file.read()}"
    if not path:
        return 0
    if FORM == "dcp":
        state = {"w": torch.zeros(256)}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        return int(state["w"][0])
    if FORM == "safetensors":
        return unpack_tensors(path)
    if FORM == "trainer":
        step = unpack_tensors(f"{path}/model.safetensors")
        assert torch.load(f"{path}/optimizer.pt")["step"] == step
        with open(f"{path}/trainer_state.json") as state_file:
            assert json.load(state_file)["global_step"] == step
        return step
    parts = sorted(glob.glob(f"{path}/*")) if os.path.isdir(path) else [path]
    assert len(parts) == (2 if FORM == "deepspeed" else 1), parts
    steps = {torch.load(part)["step"] for part in parts}
    assert len(steps) == 1
    return int(steps.pop())


if __name__ == "__main__":
    begin = load()
    tell("began", begin)
    step = begin
    while not os.path.exists("enough"):
        step += 1
        tell("saving", step)
        save(step)
        tell("saved", step)
        time.sleep(0.05)
    tell("ended", step)
