"""Single functions compared with the CUDA build, one by one."""
