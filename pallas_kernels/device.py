"""What the kernels need of the device."""

import jax


def hopper_obstacle() -> str | None:
    """Why kernels for Hopper GPUs cannot run on the default device, or under the abstract mesh in force; or None."""
    mesh = jax.sharding.get_abstract_mesh()
    kind = mesh.abstract_device.device_kind if mesh.abstract_device else jax.devices()[0].device_kind
    if any(name in kind for name in ("H100", "H200", "H800", "H20", "GH200")):
        return None
    return f"the device is {kind}: must be a Hopper GPU"


def multiprocessors() -> int:
    """Of the default device, or of that of the abstract mesh in force; the device must be a GPU."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (device and device.num_cores) or jax.devices()[0].core_count
