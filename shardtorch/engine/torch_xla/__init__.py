"""The engine on torch_xla 2.9.0: GSPMD on TPU slices or virtual CPU devices. `shardtorch.engine.start` starts it."""
