//! Gradients of deep networks that are stored in half are held against the model's, with what half rounds.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, FloatDType, Tensor};
use burn_lean::graph::{GraphError, Verified, record_with_backward};

use crate::support::{each_device, tensor, with_numbers};

#[derive(Module, Debug)]
struct Residual {
    layers: Vec<Linear>,
}

impl Residual {
    fn new(blocks: usize, dtype: FloatDType, device: &Device) -> Self {
        let layers = (0..blocks).map(|_| LinearConfig::new(16, 16).init(device));
        let model = with_numbers(
            Self {
                layers: layers.collect(),
            },
            3,
        );
        let stored = |layer: Linear| Linear {
            weight: layer
                .weight
                .map(|value| value.cast(dtype).detach().require_grad()),
            bias: layer
                .bias
                .map(|bias| bias.map(|value| value.cast(dtype).detach().require_grad())),
        };
        Self {
            layers: model.layers.into_iter().map(stored).collect(),
        }
    }

    /// The branch of one block may be without gradient.
    fn forward(&self, mut x: Tensor<2>, stopped: Option<usize>) -> Tensor<1> {
        for (index, layer) in self.layers.iter().enumerate() {
            let norm = x.clone().powi_scalar(2).mean_dim(1).sqrt();
            let branch = relu(layer.forward(x.clone() / norm));
            x = x + match stopped == Some(index) {
                true => branch.detach(),
                false => branch,
            };
        }
        x.mean()
    }
}

#[test]
fn a_branch_that_is_stopped_is_found_among_the_roundings_of_half() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        for (dtype, blocks) in [
            (FloatDType::F32, 24),
            (FloatDType::F16, 24),
            (FloatDType::BF16, 6),
        ] {
            if target.is_gpu() || !target.device.supports_dtype(dtype) {
                continue;
            }
            let model = Residual::new(blocks, dtype, &device);
            let x = tensor::<2>(5, [8, 16], &device).cast(dtype);
            let verified = |stopped: Option<usize>| {
                let forward = |model: &Residual, x| model.forward(x, stopped);
                let recording = record_with_backward(&model, &x, forward).unwrap();
                recording.verify_gradients(&model, &x)
            };
            assert_eq!(verified(None), Ok(Verified::Same), "{dtype:?}");
            let error = verified(Some(blocks / 2)).unwrap_err();
            assert_matches!(error, GraphError::StopsGradients { .. });
        }
    });
}
