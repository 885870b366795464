//! Fake quantization under Burn's kernel fusion: each operation is queued as one, and runs the
//! kernel of the backend that is fused.

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{TensorMetadata, get_or_init_device_settings};
use burn::tensor::{DType, Shape};
use burn_fusion::custom::TensorSpec;
use burn_fusion::{Fusion, FusionBackend};
use burn_lean_graph::fused::{Output, queue};

use crate::fake::composed;
use crate::fake::kernel::{Kernel, LearnedGradients, Rule, Wanted};
use crate::format::groups::Groups;

impl<B: FusionBackend + Kernel> Kernel for Fusion<B> {
    fn quantize_dequantize(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: &Rule,
    ) -> FloatTensor<Self> {
        let outputs = [float(x.shape())];
        let rule = rule.clone();
        let operation = move |[x, scale, zero_point]: [_; 3]| {
            [Output::Float(B::quantize_dequantize(
                x, scale, zero_point, &rule,
            ))]
        };
        let inputs = [x, scale, zero_point];
        let [y] = queue::<B, _, _>("quantize_dequantize", inputs, outputs, operation);
        y
    }

    fn quantize_dequantize_masked(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        rule: &Rule,
    ) -> (FloatTensor<Self>, BoolTensor<Self>) {
        let truth = get_or_init_device_settings::<Self>(&x.device()).bool_dtype;
        let outputs = [
            float(x.shape()),
            TensorSpec::new(x.shape(), DType::from(truth)),
        ];
        let rule = rule.clone();
        let operation = move |[x, scale, zero_point]: [_; 3]| {
            let (y, clipped) = B::quantize_dequantize_masked(x, scale, zero_point, &rule);
            [Output::Float(y), Output::Bool(clipped)]
        };
        let inputs = [x, scale, zero_point];
        let [y, clipped] =
            queue::<B, _, _>("quantize_dequantize_masked", inputs, outputs, operation);
        (y, clipped)
    }

    fn learned_gradients(
        x: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        zero_point: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        rule: &Rule,
        wanted: Wanted,
    ) -> LearnedGradients<FloatTensor<Self>> {
        let [of_x, of_groups] = [x.shape(), scale.shape()].map(float);
        let rule = rule.clone();
        let gradients = move |[x, scale, zero_point, dy]: [_; 4]| {
            B::learned_gradients(x, scale, zero_point, dy, &rule, wanted)
        };
        let inputs = [x, scale, zero_point, dy];
        if !wanted.zero_point {
            let operation = move |inputs| {
                let of = gradients(inputs);
                [of.x, of.scale].map(Output::Float)
            };
            let outputs = [of_x, of_groups];
            let [x, scale] = queue::<B, _, _>("scale_gradients", inputs, outputs, operation);
            return LearnedGradients {
                x,
                scale,
                zero_point: None,
            };
        }
        let operation = move |inputs| {
            let of = gradients(inputs);
            let zero_point = of.zero_point.expect("it is wanted");
            [of.x, of.scale, zero_point].map(Output::Float)
        };
        let outputs = [of_x, of_groups.clone(), of_groups];
        let [x, scale, zero_point] =
            queue::<B, _, _>("zero_point_gradients", inputs, outputs, operation);
        LearnedGradients {
            x,
            scale,
            zero_point: Some(zero_point),
        }
    }

    fn range(x: FloatTensor<Self>, groups: &Groups) -> (FloatTensor<Self>, FloatTensor<Self>) {
        // The reductions of several groups take part in fusion.
        if groups.count() > 1 {
            return composed::range::<Self>(x, groups);
        }
        let of_all = float(Shape::from([1]));
        let outputs = [of_all.clone(), of_all];
        let groups = groups.clone();
        let operation = move |[x]: [_; 1]| {
            let (min, max) = B::range(x, &groups);
            [min, max].map(Output::Float)
        };
        let [min, max] = queue::<B, _, _>("range", [x], outputs, operation);
        (min, max)
    }
}

fn float(shape: Shape) -> TensorSpec {
    TensorSpec::new(shape, DType::F32)
}
