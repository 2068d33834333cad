"""Operations of the model that have accelerator kernels: one folder per operation, the reference beside the kernel."""
