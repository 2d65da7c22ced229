"""A rank of a test, as frameworks find it under torchrun: by its environment. It has a process group already."""

import os


def as_launched(rank: int, num_ranks: int = 2) -> None:
    """The environment that torchrun gives to a rank on one node."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "GROUP_RANK": 0}
    given |= {"OMP_NUM_THREADS": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in given.items()})
