"""Names of `tf.estimator` that model functions of TensorFlow 1 use, and that TensorFlow no longer has.

from farandole.tensorflow import estimator
return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
"""

from farandole.extras import importing as _importing

with _importing("farandole.tensorflow"):
    from farandole.tensorflow.estimator import export
    from farandole.tensorflow.estimator.spec import EstimatorSpec, ModeKeys, RunConfig

__all__ = ["EstimatorSpec", "ModeKeys", "RunConfig", "export"]
