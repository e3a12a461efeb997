"""Drafters by the names that the command line and the control channel use."""

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.control import DRAFTERS
from jax_specdec.device.drafting.draft_model import DraftModel
from jax_specdec.device.drafting.drafters import Drafter, MtpDrafter, NgramDrafter, NoDrafter
from jax_specdec.device.drafting.suffix import SuffixDrafter
from jax_specdec.device.model.own_model import Model
from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel


def make_drafter(
    name: str,
    num_drafts: int,
    config: Model,
    *,
    parallel: Parallel = ONE_DEVICE,
    draft_model: ModelConfig | None = None,
) -> Drafter:
    """Make the drafter called `name`.

    Args:
      name: one of `DRAFTERS`.
      num_drafts: the most drafts a slot and step; 0 makes any name a `NoDrafter`.
      config: the configuration of the model that the drafts are for.
      parallel: the devices among which that model is split.
      draft_model: the configuration of the smaller model that drafts, for the name "model".

    Raises:
      ValueError: the name is not known, or the model has no head for it.
    """
    if name not in DRAFTERS:
        raise ValueError(f"drafter {name!r} is not known: choose one of {', '.join(DRAFTERS)}")
    drafter: Drafter
    if name == "none" or num_drafts == 0:
        return NoDrafter()
    elif name == "ngram":
        drafter = NgramDrafter(num_drafts)
    elif name == "suffix":
        drafter = SuffixDrafter(num_drafts)
    elif not isinstance(config, ModelConfig):
        raise ValueError(f"the drafter {name} is not for a model of your own: choose another one")
    elif name == "model":
        if draft_model is None:
            raise ValueError("the drafter model needs a draft_model: a smaller one that drafts")
        drafter = DraftModel(draft_model, config, num_drafts, parallel)
    else:
        drafter = MtpDrafter(config, num_drafts, parallel)
    return drafter
