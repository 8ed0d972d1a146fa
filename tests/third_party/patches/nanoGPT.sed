s/device = f'cuda:{ddp_local_rank}'/device = 'cpu'/
s/torch\.cuda\.set_device(device)/pass/
s/DDP(model, device_ids=.*)/DDP(model)/
