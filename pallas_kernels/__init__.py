"""Operations of the model that have accelerator kernels: one folder per operation, the reference beside the kernel.

What launches kernels is a `jax.jit` function of its own: a program then holds each kernel once for all layers that call
it with the same shapes. Mosaic numbers the kernels it lowers, so that equal ones would otherwise be compiled again for
every call.
"""
