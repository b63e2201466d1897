"""What a rank does in the tests of this plugin; run by `support.pool` in processes of their own."""

from torch import distributed

from support import ranks_decoders


def outputs(folders, calls, options):
    """Load checkpoints over the ranks of this job and compute the batches of this rank's replica.

    Args:
        folders: The checkpoints.
        calls: The batches of each replica; all have as many, so that all ranks run every layer together.
        options: ``tp``, ``ep``, ``moe_tp`` and ``dtype`` of the loads.
    """
    mine = calls[distributed.get_rank() // options["tp"]]
    return [ranks_decoders.outputs(folder, mine, options) for folder in folders]
