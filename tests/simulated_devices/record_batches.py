"""Record device and batches of one process of a run on two simulated CUDA devices, instead of training.

    python tests/simulated_devices/record_batches.py RECIPE --KEY=VALUE ...

The processes are connected by gloo instead of NCCL, which cannot exchange tensors of the devices.
"""

import json
import os
import sys
from pathlib import Path

import simulated_cuda


def record(trainer, **kwargs):
    args = trainer.args
    batches = [batch["labels"] for batch in trainer.get_train_dataloader()]
    assert {batch.device for batch in batches} == {args.device}
    content = {
        "device": str(args.device),
        "processes": args.world_size,
        "labels": [[[each for each in row if each != -100] for row in batch.tolist()] for batch in batches],
    }
    Path(args.output_dir, f"{args.process_index}.json").write_text(json.dumps(content), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    simulated_cuda.install(devices=2)
    sys.path.insert(0, str(simulated_cuda.REPOSITORY))
    from torch import distributed

    from training import train
    from training.run.trainer import TokenBatchTrainer

    init, barrier = distributed.init_process_group, distributed.barrier
    distributed.init_process_group = lambda backend=None, **kwargs: init("gloo", timeout=kwargs["timeout"])
    distributed.barrier = lambda device_ids=None: barrier()
    TokenBatchTrainer.train = record
    train.main()


if __name__ == "__main__":
    main()
