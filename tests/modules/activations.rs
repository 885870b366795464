//! The activations of burn-nn 0.22.1, all of which work as they are.

use burn::module::{Module, ModuleDisplay};
use burn::nn::activation::*;
use burn::tensor::{Device, Tensor};

use crate::entry::{Entry, WIDTH, Way};
use crate::table::layer;

/// An activation: a handful of elementwise operations.
fn activation<M: Module + ModuleDisplay + 'static>(
    name: &'static str,
    roundings: u32,
    build: impl Fn(&Device) -> M + 'static,
    forward: impl Fn(&M, Tensor<2>) -> Tensor<2> + 'static,
) -> Entry {
    layer(name, Way::WorksAsIs, roundings, "", build, forward)
}

pub(crate) fn activations() -> Vec<Entry> {
    vec![
        activation(
            "PRelu",
            2,
            |d| PReluConfig::new().init(d),
            |m, h| m.forward(h),
        ),
        activation(
            "SwiGlu",
            // Two linear maps, the sigmoid, two products.
            9,
            |d| SwiGluConfig::new(WIDTH, WIDTH).init(d),
            |m, h| m.forward(h),
        ),
        activation("GLU", 4, |_| GLU::new(1), |m, h| m.forward(h)),
        activation("Celu", 5, |_| CeluConfig::new().init(), |m, h| m.forward(h)),
        activation("Elu", 4, |_| EluConfig::new().init(), |m, h| m.forward(h)),
        activation("Gelu", 5, |_| Gelu::new(), |m, h| m.forward(h)),
        activation(
            "Gelu (approximate)",
            8,
            |_| Gelu::new_approximate(),
            |m, h| m.forward(h),
        ),
        activation(
            "HardShrink",
            0,
            |_| HardShrinkConfig::new().init(),
            |m, h| m.forward(h),
        ),
        activation(
            "HardSigmoid",
            2,
            |_| HardSigmoidConfig::new().init(),
            |m, h| m.forward(h),
        ),
        activation("HardSwish", 4, |_| HardSwish::new(), |m, h| m.forward(h)),
        activation(
            "Hardtanh",
            0,
            |_| HardtanhConfig::new().init(),
            |m, h| m.forward(h),
        ),
        activation(
            "LeakyRelu",
            1,
            |_| LeakyReluConfig::new().init(),
            |m, h| m.forward(h),
        ),
        activation("LogSigmoid", 5, |_| LogSigmoid::new(), |m, h| m.forward(h)),
        activation("Mish", 6, |_| Mish::new(), |m, h| m.forward(h)),
        activation("Relu", 0, |_| Relu::new(), |m, h| m.forward(h)),
        activation("Relu6", 0, |_| Relu6::new(), |m, h| m.forward(h)),
        activation(
            "RRelu",
            2,
            |_| RReluConfig::new().init(),
            |m, h| m.forward(h),
        )
        .random(),
        activation("Selu", 5, |_| Selu::new(), |m, h| m.forward(h)),
        activation(
            "Shrink",
            2,
            |_| ShrinkConfig::new().init(),
            |m, h| m.forward(h),
        ),
        activation("Sigmoid", 4, |_| Sigmoid::new(), |m, h| m.forward(h)),
        activation("SiLU", 5, |_| SiLU::new(), |m, h| m.forward(h)),
        activation(
            "SoftShrink",
            1,
            |_| SoftShrinkConfig::new().init(),
            |m, h| m.forward(h),
        ),
        activation(
            "Softplus",
            5,
            |_| SoftplusConfig::new().init(),
            |m, h| m.forward(h),
        ),
        activation("Softsign", 3, |_| Softsign::new(), |m, h| m.forward(h)),
        activation("Tanh", 1, |_| Tanh::new(), |m, h| m.forward(h)),
        activation(
            "Tanhshrink",
            // Near zero it is a third of x³: it triples the five relative errors of its input, and
            // the result is a fraction of the rounded hyperbolic tangent.
            15,
            |_| Tanhshrink::new(),
            |m, h| m.forward(h),
        ),
        // The outputs of some of these jump at 0.5; no input of theirs is that close to it.
        activation(
            "Threshold",
            0,
            |_| ThresholdConfig::new(0.5, 0.0).init(),
            |m, h| m.forward(h),
        ),
        activation(
            "ThresholdedRelu",
            0,
            |_| ThresholdedReluConfig::new().with_alpha(0.5).init(),
            |m, h| m.forward(h),
        ),
        layer(
            "Activation",
            Way::WorksAsIs,
            2,
            "as the activation inside",
            |d| ActivationConfig::PRelu(PReluConfig::new()).init(d),
            |m, h| m.forward(h),
        ),
    ]
}
