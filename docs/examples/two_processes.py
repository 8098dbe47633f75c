"""A MoE block over the devices of two processes, as over two hosts.

    python docs/examples/two_processes.py                   starts both on this machine, on CPUs
    python docs/examples/two_processes.py 0 HOST:PORT       on the first host; the second one takes 1 for 0

Every process runs the same program and sees all devices; each makes its own part of the data. CPUs exchange by gloo;
GPUs need neither of the two settings.
"""

import socket
import subprocess
import sys

import jax

PROCESSES, STEPS = 2, 4


def worker(process: int, coordinator: str) -> None:
    """One process of the run."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(coordinator, PROCESSES, process)

    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import octavo
    import octavo_jax
    from octavo_jax import moe

    devices, width, hidden, experts, tokens = jax.device_count(), 64, 32, 8, 64
    mesh = jax.make_mesh((devices,), ("ep",), (AxisType.Auto,))
    along = {"x": P("ep"), "router": P(), "wi": P("ep"), "wo": P("ep")}
    places = {name: NamedSharding(mesh, spec) for name, spec in along.items()}

    def initial() -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = {"router": (width, experts), "wi": (experts, width, 2 * hidden), "wo": (experts, hidden, width)}
        return {
            name: jax.random.normal(key, shape) * shape[-2] ** -0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    @jax.jit
    def step(parameters: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss(parameters: dict[str, jax.Array]) -> jax.Array:
            y, stats = moe.moe_mlp(x, **parameters, k=2, recipe=octavo.MXFP8(), sharding=octavo_jax.MeshAxes(ep="ep"))
            return jnp.mean((y - jnp.tanh(x)) ** 2) + 0.01 * stats.balance_loss

        value, gradients = jax.value_and_grad(loss)(parameters)
        return jax.tree.map(lambda p, g: p - 2.0 * g, parameters, gradients), value

    # Parameters are made where they lie; each process draws the tokens of its own devices.
    parameters = jax.jit(initial, out_shardings={name: places[name] for name in ("router", "wi", "wo")})()
    mine = np.random.default_rng(process).standard_normal((tokens // PROCESSES, width)).astype(np.float32)
    x = jax.make_array_from_process_local_data(places["x"], mine)
    losses = []
    with jax.set_mesh(mesh):
        for _ in range(STEPS):
            parameters, value = step(parameters, x)
            losses.append(float(value))
    told = " ".join(f"{value:.6f}" for value in losses)
    print(f"process {process} of {PROCESSES}, {devices} devices: loss {told}\n", end="", flush=True)  # at once


def start_both() -> int:
    """Both processes on this machine; 0 where both ended well."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__]
    started = [subprocess.Popen([*command, str(process), f"localhost:{port}"]) for process in range(PROCESSES)]
    return max(one.wait() for one in started)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(start_both())
    worker(int(sys.argv[1]), sys.argv[2])
