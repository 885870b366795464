//! Fake quantization as a backend operation, so that it can have gradients of its own: the
//! straight-through estimator, and those of learned scales.
//!
//! [Estimating or Propagating Gradients Through Stochastic Neurons, Bengio et al.,
//! 2013](https://arxiv.org/abs/1308.3432)

// Burn marks its ndarray backend as deprecated; this project still serves its users.
#![allow(deprecated)]

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Autodiff, AutodiffBackend, Backend, backend_extension};
use burn::tensor::FloatDType;

use crate::fake::kernel::{Kernel, Rule, Wanted};
use crate::{QuantParams, fake::LearnedGradient};

/// Fake quantization with gradients. All tensors are F32; scales and zero points `[groups]`.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Capture,
    Autodiff
)]
pub(crate) trait StraightThrough: Backend {
    /// The gradient of `x` passes where `x` was not clipped; scale and zero point have none.
    fn fake_quantize(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: Rule,
    ) -> FloatTensor<Self>;

    /// Scale and zero point have gradients too.
    fn fake_quantize_learned(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: Rule,
        gradient: LearnedGradient,
    ) -> FloatTensor<Self>;

    /// 1 where `x` was clipped or is NaN, 0 elsewhere; no gradient.
    fn clipped(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: Rule,
    ) -> FloatTensor<Self>;
}

impl<B: Kernel> StraightThrough for B {
    fn fake_quantize(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: Rule,
    ) -> FloatTensor<Self> {
        Self::quantize_dequantize(x, scale, zero_point, &rule)
    }

    fn fake_quantize_learned(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: Rule,
        _gradient: LearnedGradient,
    ) -> FloatTensor<Self> {
        let (scale, zero_point) = usable::<Self>(scale, zero_point, &rule);
        Self::quantize_dequantize(x, scale, zero_point, &rule)
    }

    fn clipped(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: Rule,
    ) -> FloatTensor<Self> {
        let (_, clipped) = Self::quantize_dequantize_masked(x, scale, zero_point, &rule);
        Self::bool_into_float(clipped, FloatDType::F32)
    }
}

/// A learned scale kept above zero, and a learned zero point as the integer that it stands for.
fn usable<B: Backend>(
    scale: FloatTensor<B>,
    zero_point: FloatTensor<B>,
    rule: &Rule,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (min, max) = rule.grid.bounds();
    let zero_point = B::float_round(zero_point);
    (
        B::float_clamp_min(scale, QuantParams::EPSILON.into()),
        B::float_clamp(zero_point, min.into(), max.into()),
    )
}

impl<B: StraightThrough + Kernel, C: CheckpointStrategy> StraightThrough for Autodiff<B, C> {
    fn fake_quantize(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: Rule,
    ) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let (scale, zero_point) = (scale.into_parts().0, zero_point.into_parts().0);
        match PassWhereInside
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => {
                let (y, clipped) = B::quantize_dequantize_masked(x, scale, zero_point, &rule);
                prep.finish(clipped, y)
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::quantize_dequantize(x, scale, zero_point, &rule))
            }
        }
    }

    fn fake_quantize_learned(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: Rule,
        gradient: LearnedGradient,
    ) -> FloatTensor<Self> {
        let (x, x_node) = x.into_parts();
        let (scale, scale_node) = scale.into_parts();
        let (zero_point, zero_point_node) = zero_point.into_parts();
        let (scale, zero_point) = usable::<B>(scale, zero_point, &rule);
        let y = B::quantize_dequantize(x.clone(), scale.clone(), zero_point.clone(), &rule);
        match LearnScale
            .prepare::<C>([x_node, scale_node, zero_point_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(
                Learned {
                    operands: [x, scale, zero_point],
                    rule,
                    gradient,
                },
                y,
            ),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn clipped(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: Rule,
    ) -> FloatTensor<Self> {
        let [x, scale, zero_point] = [x, scale, zero_point].map(|tensor| tensor.into_parts().0);
        Self::from_inner(B::clipped(x, scale, zero_point, rule))
    }
}

/// Saves where `x` was clipped, which is a quarter of the size of `x`.
#[derive(Debug)]
struct PassWhereInside;

impl<B: Backend> Backward<B, 1> for PassWhereInside {
    type State = BoolTensor<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let clipped = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |dy| {
            B::float_mask_fill(dy, clipped, 0f32.into())
        });
    }
}

#[derive(Debug)]
struct LearnScale;

/// What the gradients of a learned scale need: the operands themselves, nothing derived.
#[derive(Debug, Clone)]
struct Learned<B: Backend> {
    operands: [FloatTensor<B>; 3],
    rule: Rule,
    gradient: LearnedGradient,
}

impl<B: Kernel> Backward<B, 3> for LearnScale {
    type State = Learned<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let Learned {
            operands: [x, scale, zero_point],
            rule,
            gradient: LearnedGradient { clip, factor },
        } = ops.state;
        let dy = grads.consume::<B>(&ops.node);
        let wanted = Wanted {
            clip,
            // Only LSQ+ learns it.
            zero_point: ops.parents[2].is_some(),
        };
        let of = B::learned_gradients(x, scale, zero_point, dy, &rule, wanted);
        let factored = |gradient| B::float_mul_scalar(gradient, factor.into());
        let gradients = [
            Some(of.x),
            Some(factored(of.scale)),
            of.zero_point.map(factored),
        ];
        for (parent, gradient) in ops.parents.iter().zip(gradients) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Capture;
    use burn::tensor::{Device, Tensor};

    use crate::fake_quantize;
    use crate::{
        NumberFormat, QuantParams, Scheme,
        fake::{LearnedGradient, fake_quantize_learned},
    };

    /// An audit tells a quantized tensor from the one that it was made of by its identifier.
    #[test]
    fn a_traced_fake_quantization_gives_another_tensor() {
        let capture = Device::capture();
        let id = |tensor: &Tensor<2>| {
            let primitive = tensor.clone().try_into_primitive::<Capture>();
            primitive.expect("it is on the capture device").id()
        };
        let captured = capture.capture_scope(|scope| {
            let x = Tensor::<2>::ones([2, 4], &capture);
            let scheme = Scheme::symmetric(NumberFormat::int8());
            let qparams = QuantParams::of(&x, &scheme).unwrap();
            let y = fake_quantize(x.clone(), &qparams, &scheme);
            let gradient = LearnedGradient::lsq(&scheme, &[2, 4]).unwrap();
            let learned = fake_quantize_learned(x.clone(), &qparams, &scheme, gradient);
            assert_eq!(y.dims(), [2, 4]);
            assert_ne!(id(&x), id(&y));
            assert_ne!(id(&x), id(&learned));
            scope.complete([], [id(&y), id(&learned)])
        });
        assert!(captured.is_ok(), "{:?}", captured.err());
    }
}
