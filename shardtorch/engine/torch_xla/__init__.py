"""The engine on torch_xla 2.9.0: GSPMD on TPU slices, or on virtual CPU devices. Started by `shardtorch.engine.start`."""
