s/return has_gpu and .*/return True/
s/backend = torch.*/backend = "gloo"/
s/torch\.accelerator\.set_device_index(.*)/torch.nn.Module.to = torch.Tensor.to = lambda self, *args, **kwargs: self/
s/DDP(model, device_ids=.*)/DDP(model)/
