"""Checks of graphs with lookup tables, whose content is part of the frozen graph."""

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from farandole.errors import ConfigError
from farandole.estimators.predictions.tensorflow import GraphPredictor
from farandole.estimators.tf_transformer import TFInputGraph
from farandole.estimators.trainers.model_fn.frozen_graph import FrozenGraph

v1 = tf.compat.v1
CITIES = ["Köln", "Paris", "Rom"]


def applied(graph: TFInputGraph, kinds: list[int]) -> list[Any]:
    """Save and load the graph, then return a worker's predictions for a column."""
    facts = graph.frozen.facts()
    again = FrozenGraph.revived(graph.frozen.graph, facts)
    assert again.facts() == facts
    ((given,), (output,)) = again.inputs, again.outputs
    predictor = GraphPredictor(names=("o0",), frozen=again, inputs=[("kind", given)], outputs_of_graph=[output])
    (values,) = predictor.load()([np.array(kinds)])
    return list(predictor.row_shaped(0, values))


def check_tables_of_constants_and_files(rank: int, size: int, folder: Path) -> None:
    names = folder / f"{rank}.txt"
    names.write_text("\n".join(CITIES), encoding="utf-8")
    whole, number = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        kind = v1.placeholder(tf.int64, [None], "kind")
        lines = tf.lookup.TextFileInitializer(str(names), tf.int64, number, tf.string, whole)
        city = tf.lookup.StaticHashTable(lines, "?").lookup(kind, name="city")
        weights = tf.lookup.KeyValueTensorInitializer(CITIES, [0.5, 1.5, 2.5])
        scale = v1.get_variable("scale", initializer=2.0)
        tf.multiply(scale, tf.lookup.StaticHashTable(weights, -1.0).lookup(city), name="weight")
        tf.add(kind, 1, name="next")
        session.run(v1.global_variables_initializer())
        try:
            TFInputGraph.fromGraph(graph, session, ["kind"], ["weight"])
        except ConfigError as error:
            assert "is not filled; run tf.compat.v1.tables_initializer()" in str(error)
        else:
            raise AssertionError("no error about empty tables")
        session.run(v1.tables_initializer())
        taken = TFInputGraph.fromGraph(graph, session, ["kind"], ["weight"])
        plain = TFInputGraph.fromGraph(graph, session, ["kind"], ["next"])
    names.unlink()
    assert applied(taken, [2, 0, 7]) == [5.0, 1.0, -2.0]
    assert len(taken.frozen.fills) == 2 and plain.frozen.fills == ()
    assert applied(plain, [2, 0]) == [3, 1]


def check_tables_of_saved_models(rank: int, size: int, folder: Path) -> None:
    names, model = folder / f"{rank}.txt", tf.Module()
    names.write_text("\n".join(CITIES), encoding="utf-8")
    whole, number = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
    lines = tf.lookup.TextFileInitializer(str(names), tf.int64, number, tf.string, whole)
    model.cities = tf.lookup.StaticHashTable(lines, "?")

    def serve(kind: Any) -> dict[str, Any]:
        return {"city": model.cities.lookup(kind)}

    served = tf.function(serve, input_signature=[tf.TensorSpec([None], tf.int64, "kind")])
    tf.saved_model.save(model, str(folder / f"saved{rank}"), {"serving_default": served})
    taken = TFInputGraph.fromSavedModelWithSignature(str(folder / f"saved{rank}"))
    assert applied(taken, [1, 0, 9]) == ["Paris", "Köln", "?"]
