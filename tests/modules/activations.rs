//! The activations of burn-nn 0.22.1, all of which work as they are.

use burn::nn::activation::*;

use crate::entry::{Entry, WIDTH, Way};
use crate::table::layer;

/// An activation, of so many roundings: a handful of elementwise operations.
macro_rules! activation {
    ($name:literal, $roundings:literal => $build:expr) => {
        layer($name, Way::WorksAsIs, $roundings, "", $build, |m, h| {
            m.forward(h)
        })
    };
}

pub(crate) fn activations() -> Vec<Entry> {
    vec![
        activation!("PRelu", 2 => |d| PReluConfig::new().init(d)),
        // Two linear maps, the sigmoid, two products.
        activation!("SwiGlu", 9 => |d| SwiGluConfig::new(WIDTH, WIDTH).init(d)),
        activation!("GLU", 4 => |_| GLU::new(1)),
        activation!("Celu", 5 => |_| CeluConfig::new().init()),
        activation!("Elu", 4 => |_| EluConfig::new().init()),
        activation!("Gelu", 5 => |_| Gelu::new()),
        activation!("Gelu (approximate)", 8 => |_| Gelu::new_approximate()),
        activation!("HardShrink", 0 => |_| HardShrinkConfig::new().init()),
        activation!("HardSigmoid", 2 => |_| HardSigmoidConfig::new().init()),
        activation!("HardSwish", 4 => |_| HardSwish::new()),
        activation!("Hardtanh", 0 => |_| HardtanhConfig::new().init()),
        activation!("LeakyRelu", 1 => |_| LeakyReluConfig::new().init()),
        activation!("LogSigmoid", 5 => |_| LogSigmoid::new()),
        activation!("Mish", 6 => |_| Mish::new()),
        activation!("Relu", 0 => |_| Relu::new()),
        activation!("Relu6", 0 => |_| Relu6::new()),
        activation!("RRelu", 2 => |_| RReluConfig::new().init()).random(),
        activation!("Selu", 5 => |_| Selu::new()),
        activation!("Shrink", 2 => |_| ShrinkConfig::new().init()),
        activation!("Sigmoid", 4 => |_| Sigmoid::new()),
        activation!("SiLU", 5 => |_| SiLU::new()),
        activation!("SoftShrink", 1 => |_| SoftShrinkConfig::new().init()),
        activation!("Softplus", 5 => |_| SoftplusConfig::new().init()),
        activation!("Softsign", 3 => |_| Softsign::new()),
        activation!("Tanh", 1 => |_| Tanh::new()),
        // Near zero it is a third of x³: it triples the five relative errors of its input, and
        // the result is a fraction of the rounded hyperbolic tangent.
        activation!("Tanhshrink", 15 => |_| Tanhshrink::new()),
        // The outputs of some of these jump at 0.5; no input of theirs is that close to it.
        activation!("Threshold", 0 => |_| ThresholdConfig::new(0.5, 0.0).init()),
        activation!("ThresholdedRelu", 0 => |_| {
            ThresholdedReluConfig::new().with_alpha(0.5).init()
        }),
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
