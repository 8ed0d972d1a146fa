"""Saves its own checkpoint at every step, slowly, and begins at the newest that it finds.

It loads without a second thought, as most scripts do: a torn newest one ends it.
Arguments: the format, the folder. Rank 0 writes, and `trail` says what each of its lives did. In
the folders of DeepSpeed, Megatron-LM, and torch.distributed.checkpoint each rank writes its part.
"""

import glob
import io
import json
import os
import re
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

PIECES = 4
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
FILES = {
    "torch": "ckpt-{:05}.pt",
    "lightning": "epoch=0-step={}.ckpt",
    "safetensors": "{:06}.safetensors",
    "overwritten": "ckpt.pt",
}
SHARED = ("deepspeed", "megatron", "dcp")
"""Formats of which each rank writes a part."""
POINTERS = {
    "deepspeed": ("latest", "global_step{}"),
    "megatron": ("latest_checkpointed_iteration.txt", "{}"),
}
"""Files that name the newest one, and what they say."""


def tell(*words: object) -> None:
    if RANK == 0:
        fd = os.open("trail", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())
        os.close(fd)


def wait_for_others() -> None:
    if dist.is_initialized():
        dist.barrier()


def is_enough() -> bool:
    """Return whether rank 0 sees the file that ends the script."""
    flag = torch.tensor([float(os.path.exists("enough"))])
    if dist.is_initialized():
        dist.broadcast(flag, 0)
    return bool(flag.item())


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


def point(form: str, out: str, step: int) -> None:
    """Have the file that names the newest one name that of a step."""
    wait_for_others()
    if RANK == 0:
        name, text = POINTERS[form]
        with open(f"{out}/{name}", "w") as file:
            time.sleep(0.04)  # It is empty now; the libraries write it at once as well.
            file.write(text.format(step))
    wait_for_others()


def save(form: str, out: str, step: int) -> None:
    if form == "deepspeed":
        parts = [f"zero_pp_rank_{RANK}_mp_rank_00_optim_states.pt"]
        for part in (["mp_rank_00_model_states.pt"] if RANK == 0 else []) + parts:
            write(f"{out}/global_step{step}/{part}", pack(step))
        point(form, out, step)
    elif form == "megatron":
        write(f"{out}/iter_{step:07}/mp_rank_{RANK:02}/model_optim_rng.pt", pack(step))
        point(form, out, step)
    elif form == "dcp":
        dcp.save({f"w{RANK}": torch.full((256,), float(step))},
                 checkpoint_id="staged", no_dist=not dist.is_initialized())  # fmt: skip
        wait_for_others()
        for name in (f"__{RANK}_0.distcp", ".metadata"):
            if name != ".metadata" or RANK == 0:
                with open(f"staged/{name}", "rb") as file:
                    write(f"{out}/step-{step}/{name}", file.read())
            wait_for_others()
    elif RANK > 0:
        time.sleep(0.05)
    elif form in FILES:
        data = pack_tensors(step) if form == "safetensors" else pack(step)
        write(f"{out}/{FILES[form].format(step)}", data)
    elif form == "trainer":
        folder = f"{out}/checkpoint-{step}"
        write(f"{folder}/config.json", b'{"model_type": "x"}')
        write(f"{folder}/model.safetensors", pack_tensors(step))
        write(f"{folder}/training_args.bin", pack(step))
        write(f"{folder}/optimizer.pt", pack(step))
        write(f"{folder}/trainer_state.json", json.dumps({"global_step": step}).encode())


def list_saved(form: str, out: str) -> list[str]:
    """Return what the script may begin at, the newest first."""
    if form in POINTERS and os.path.exists(f"{out}/{POINTERS[form][0]}"):
        with open(f"{out}/{POINTERS[form][0]}") as file:
            text = file.read()
        return [f"{out}/{text}" if form == "deepspeed" else f"{out}/iter_{text:>07}"]
    paths = glob.glob(f"{out}/*") if form not in POINTERS else []
    return sorted(paths, key=lambda p: int((re.findall(r"\d+", p) or [0])[-1]), reverse=True)


def load(form: str, path: str, ranks: int = RANKS) -> int:
    """Return the step of a checkpoint; raise if it is not whole."""
    if form == "dcp":
        state = {f"w{rank}": torch.zeros(256) for rank in range(ranks)}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        steps = {int(value[-1]) for value in state.values()}
    elif form == "safetensors":
        steps = {unpack_tensors(path)}
    elif form == "trainer":
        with open(f"{path}/trainer_state.json") as file:
            steps = {json.load(file)["global_step"], unpack_tensors(f"{path}/model.safetensors")}
        steps.add(torch.load(f"{path}/optimizer.pt")["step"])
    else:
        inner = "*/*" if form == "megatron" else "*"
        parts = sorted(glob.glob(f"{path}/{inner}")) if os.path.isdir(path) else [path]
        assert len(parts) == {"deepspeed": 1 + ranks, "megatron": ranks}.get(form, 1), parts
        steps = {torch.load(part)["step"] for part in parts}
    assert len(steps) == 1, f"{path} has parts of steps {steps}"
    return int(steps.pop())


def main() -> None:
    form, out = sys.argv[1:3]
    shared = form in SHARED
    if RANKS > 1 and shared:
        dist.init_process_group("gloo")
    saved = list_saved(form, out) if shared or RANK == 0 else []  # Rank 0 may save already.
    step = load(form, saved[0]) if saved else 0
    tell("began", step)
    wait_for_others()
    while not is_enough():
        step += 1
        tell("saving", step)
        save(form, out, step)
        tell("saved", step)
        time.sleep(0.05)
    tell("ended", step)


if __name__ == "__main__":
    main()
