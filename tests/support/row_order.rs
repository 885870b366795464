//! Layers of which one may see its rows in an order that follows from the data.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};

use super::{values, with_numbers};

pub(crate) const WIDTH: usize = 12;

pub(crate) type Layers = Vec<Linear>;

pub(crate) fn layers(count: usize, device: &Device) -> Layers {
    let layers = (0..count).map(|_| LinearConfig::new(WIDTH, WIDTH).init(device));
    with_numbers(layers.collect(), 3)
}

/// Rows by their first feature.
pub(crate) fn order(h: &Tensor<2>) -> Tensor<1, Int> {
    h.clone().slice_dim(1, 0..1).argsort(0).squeeze_dim(1)
}

/// The layers one after the other, with rows as they come.
pub(crate) fn in_place(model: &Layers, x: Tensor<2>) -> Tensor<2> {
    model.iter().fold(x, |x, layer| layer.forward(x))
}

/// Two layers, the second one with the rows by what the first one gave.
pub(crate) fn sorted(model: &Layers, x: Tensor<2>) -> Tensor<2> {
    let h = model[0].forward(x);
    let order = order(&h);
    model[1].forward(h.select(0, order))
}

/// By how much layers are off from others, with rows as they come.
pub(crate) fn off(model: &Layers, done: &Layers, x: Tensor<2>) -> f32 {
    let expected = values(in_place(model, x.clone()));
    let found = values(in_place(done, x));
    let pairs = expected.iter().zip(&found);
    let squares: f32 = pairs.map(|(a, b)| (a - b).powi(2)).sum();
    (squares / expected.iter().map(|a| a * a).sum::<f32>()).sqrt()
}
