"""Flyte's type transformer for estimators and fitted models, as in `def predict(model: TorchModel)`."""

from pathlib import Path

from flytekit import Blob, BlobMetadata, BlobType, FlyteContext, Literal, LiteralType, Scalar
from flytekit.core.type_engine import AsyncTypeTransformer, TypeEngine

from farandole.estimators.portable import Portable


class ModelTransformer(AsyncTypeTransformer[Portable]):  # type: ignore[misc]  # flytekit has no types
    """Type transformer that stores an estimator or a fitted model as a folder in the layout of pyspark.ml.

    `load` of the model's class reads the folder. Neither storing nor reading needs Spark or Java. Reading unpickles, so
    the task that made the model must be trusted."""

    _TYPE = BlobType(format="farandole", dimensionality=BlobType.BlobDimensionality.MULTIPART)

    def __init__(self) -> None:
        super().__init__("farandole model", Portable)

    def get_literal_type(self, t: type[Portable]) -> LiteralType:
        """Return the type of a folder, for every class."""
        return LiteralType(blob=self._TYPE)

    async def async_to_literal(
        self, ctx: FlyteContext, python_val: Portable, python_type: type[Portable], expected: LiteralType
    ) -> Literal:
        """Upload a model's files to the task's raw outputs; raises `PicklingError` if it cannot be pickled."""
        folder = Path(ctx.file_access.get_random_local_directory())
        for name, content in python_val.to_files().items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        place = await ctx.file_access.async_put_raw_data(str(folder))
        return Literal(scalar=Scalar(blob=Blob(metadata=BlobMetadata(type=self._TYPE), uri=place)))

    async def async_to_python_value(
        self, ctx: FlyteContext, lv: Literal, expected_python_type: type[Portable]
    ) -> Portable:
        """Download a model; raises `ConfigError` for one that is not of the expected class."""
        folder = Path(ctx.file_access.get_random_local_directory())
        await ctx.file_access.async_get_data(lv.scalar.blob.uri, str(folder), is_multipart=True)
        return expected_python_type.from_files(lambda name: (folder / name).read_bytes())


TypeEngine.register(ModelTransformer())
