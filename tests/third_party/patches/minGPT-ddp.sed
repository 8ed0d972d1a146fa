s/return has_gpu and .*/return True/
s/device: torch\.device = .*/device = torch.device("cpu")/
s/torch\.accelerator\.set_device_index(.*)/torch.nn.Module.to = torch.Tensor.to = lambda self, *args, **kwargs: self/
s/DDP(self\.model, device_ids=.*)/DDP(self.model)/
