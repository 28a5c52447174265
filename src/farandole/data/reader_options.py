"""Arguments of Petastorm's readers, checked when they are given."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from farandole.data.formats.selection import Condition, Predicate
from farandole.data.loading.agreement import Gather
from farandole.data.loading.reading import Reading
from farandole.data.loading.settings import check_count
from farandole.data.transform import TransformSpec
from farandole.errors import ConfigError
from farandole.refusals import IGNORED_READER_ARGUMENTS, REFUSED_READER_ARGUMENTS

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReaderOptions:
    """Petastorm's arguments of both functions, with its defaults, and four of farandole's at the end.

    `version` is the version of a table to read. With `gather`, an all-gather of objects, making a reader is collective:
    shards compare their data, and read the version that the first shard has opened.

    Raises `ConfigError` for values that are invalid or not supported."""

    reader_pool_type: Literal["thread", "process", "dummy"] = "thread"
    workers_count: int = 10
    pyarrow_serialize: bool = False
    results_queue_size: int = 50
    seed: int | None = None
    shuffle_rows: bool = False
    shuffle_row_groups: bool = True
    shuffle_row_drop_partitions: int = 1
    predicate: Predicate | None = None
    rowgroup_selector: object = None
    num_epochs: int | None = 1
    cur_shard: int | None = None
    shard_count: int | None = None
    shard_seed: int | None = None
    cache_type: Literal["null", "local-disk"] | None = "null"
    cache_location: str | None = None
    cache_size_limit: int | None = None
    cache_row_size_estimate: int | None = None
    cache_extra_settings: Mapping[str, object] | None = None
    hdfs_driver: str = "libhdfs3"
    transform_spec: TransformSpec | None = None
    filters: Sequence[Condition] | Sequence[Sequence[Condition]] | None = None
    storage_options: Mapping[str, object] | None = field(default=None, repr=False)  # holds secrets
    zmq_copy_buffers: bool = True
    filesystem: object = None
    convert_early_to_numpy: bool = False
    nulls: Mapping[str, object] = field(default_factory=dict)
    reading: Reading = field(default_factory=Reading)
    version: int | None = None
    gather: Gather | None = None

    def __post_init__(self) -> None:
        for name, why in REFUSED_READER_ARGUMENTS.items():
            if getattr(self, name) is not None:
                raise ConfigError(name, why)
        if (self.cur_shard is None) != (self.shard_count is None):
            raise ConfigError("cur_shard", "and shard_count go together")
        if self.shard_count is not None:
            check_count("shard_count", self.shard_count, 1)
        spec: object = self.transform_spec
        if spec is not None and not isinstance(spec, TransformSpec):
            raise ConfigError("transform_spec", f"must be TransformSpec(...), got {spec!r}")
        if self.num_epochs is not None:  # None: endless
            check_count("num_epochs", self.num_epochs, 1)
        if self.reader_pool_type not in ("thread", "process", "dummy"):
            raise ConfigError("reader_pool_type", f"must be thread, process or dummy, got {self.reader_pool_type!r}")
        if self.cache_type not in (None, "null", "local-disk"):
            raise ConfigError("cache_type", f"must be null or local-disk, got {self.cache_type!r}")
        if self.cache_type == "local-disk" and self.cache_location is None:
            raise ConfigError("cache_location", "name a folder for cache_type='local-disk'")
        if self.reader_pool_type == "process" and self.transform_spec is None:
            log.warning(
                "reader_pool_type='process' reads on threads without a transform_spec: Arrow decodes outside of "
                "Python's lock"
            )
        for each in fields(self):
            if each.name in IGNORED_READER_ARGUMENTS and getattr(self, each.name) != each.default:
                log.warning("%s means nothing here and is ignored", each.name)
