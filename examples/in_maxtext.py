"""A tiny teacher in MaxText, with and without `install()`: one distillation loss, less memory.

    pip install maxtext==0.2.5 && pip install . && python examples/in_maxtext.py

The teacher's top K logits are saved by `teacher_step`, as `save_top_k_teacher_logits` calls it. A
student learns from them by MaxText's own loss.
"""

import os

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.models.models import Transformer
from maxtext.trainers.post_train.distillation import distillation_utils
from maxtext.trainers.post_train.distillation import save_top_k_teacher_logits as script

from jax_specdec.adapters import maxtext as adapter

VOCAB, TOKENS, K = 32_000, 512, 16
SMALL = (
    "run_name=tiny enable_checkpointing=false base_emb_dim=64 base_num_query_heads=2 head_dim=32 "
    "base_num_kv_heads=2 base_mlp_dim=64 base_num_decoder_layers=1 max_prefill_predict_length=4 "
    "per_device_batch_size=1 attention=dot_product skip_jax_distributed_system=true "
    f"scan_layers=false log_config=false dtype=float32 max_target_length={TOKENS} "
    f"vocab_size={VOCAB}"
)


def model():
    """Make a Transformer of one layer, and its mesh."""
    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    config = pyconfig.initialize(["", base, *SMALL.split()])
    devices = np.array(jax.devices()[:1]).reshape([1] * len(config.mesh_axes))
    mesh = jax.sharding.Mesh(devices, config.mesh_axes)
    return Transformer(config, mesh, None, rngs=nnx.Rngs(0)), mesh


def teach(teacher, batch, student, labels):
    """Tell MaxText's loss from the teacher's top K, and the MB that the teacher's step takes."""
    logits, ids = script.teacher_step(teacher, batch, K)
    output = distillation_utils.DistillationForwardOutput
    strategy = distillation_utils.CombinedDistillationStrategy(
        None, None, temperature=1.0, alpha=0.5, vocab_size=VOCAB
    )
    loss, _ = strategy.compute_loss(output(student), output(logits, top_k_indices=ids), labels)
    graph, state = nnx.split(teacher)
    step = jax.jit(lambda state, batch: script.teacher_step(nnx.merge(graph, state), batch, K))
    memory = step.lower(state, batch).compile().memory_analysis()
    return float(loss), memory.temp_size_in_bytes / 1e6


def main():
    teacher, mesh = model()
    ids = jax.random.randint(jax.random.key(0), (1, TOKENS), 0, VOCAB)
    batch = {"inputs": ids, "inputs_position": jnp.arange(TOKENS)[None]}
    student = jax.random.normal(jax.random.key(1), (1, TOKENS, VOCAB))
    labels = jax.nn.one_hot(jnp.roll(ids, -1, axis=1), VOCAB)
    with jax.set_mesh(mesh):
        print(
            "MaxText's own  loss {:.4f}, {:.0f} MB".format(*teach(teacher, batch, student, labels))
        )
        with adapter.install() as names:
            loss_and_bytes = teach(teacher, batch, student, labels)
            print("installed      loss {:.4f}, {:.0f} MB".format(*loss_and_bytes))
    print("in the place of", *names)


if __name__ == "__main__":
    main()
