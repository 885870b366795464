//! Sizes that stay open as numbers of operations, and where counts begin.

use burn::module::Module;
use burn::nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, RotaryEncoding, RotaryEncodingConfig,
};
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_lean::deploy::OpenAxis;

use crate::judge::Nothing;
use crate::open_axes::{open, runs, sequence};
use crate::support::{on_each, tensor, with_numbers};

/// Means by hand, distances from the end, and what is compared with a length.
#[test]
fn lengths_as_numbers_of_operations_are_computed_in_the_file() {
    on_each(|device| {
        let shapes = [[2, 5], [1, 1], [3, 2], [2, 9]];
        let inputs = shapes.map(|shape| tensor::<2>(1, shape, device));
        let forward = |_: &Nothing, x: Tensor<2>| {
            let ([batch, length], device) = (x.dims(), x.device());
            let mean = x.clone().sum_dim(1) / length as f32;
            let places = Tensor::<1, Int>::arange(0..length as i64, &device);
            let left = (places.clone() - length as i64).reshape([1, length]);
            let last = places.equal_elem(length as i64 - 1).float();
            (x - mean) * left.float() + last.reshape([1, length]) * batch as f32
        };
        runs(&Nothing {}, &[sequence()], &inputs, forward);
    });
}

#[derive(Module, Debug)]
struct Decoder {
    query: Linear,
    key: Linear,
    rotary: RotaryEncoding,
    places: Embedding,
}

impl Decoder {
    fn new(device: &Device) -> Self {
        let decoder = Self {
            query: LinearConfig::new(8, 8).init(device),
            key: LinearConfig::new(8, 8).init(device),
            rotary: RotaryEncodingConfig::new(40, 4).init(device),
            places: EmbeddingConfig::new(40, 8).init(device),
        };
        with_numbers(decoder, 5)
    }

    /// What comes after keys of the past `[batch, heads, past, head]`, with positions, rotations and a mask
    /// that go on where they end; and all keys, each a value, too.
    fn forward(&self, (past, x): (Tensor<4>, Tensor<3>)) -> Tensor<4> {
        let ([batch, heads, start, head], device) = (past.dims(), x.device());
        let [_, count, _] = x.dims();
        let places = start as i64..(start + count) as i64;
        let places = Tensor::<1, Int>::arange(places, &device).unsqueeze::<2>();
        let x = x + self.places.forward(places);
        let split = |x: Tensor<3>| x.reshape([batch, count, heads, head]).swap_dims(1, 2);
        let query = self
            .rotary
            .apply(split(self.query.forward(x.clone())), start);
        let key = self.rotary.apply(split(self.key.forward(x)), start);
        let keys = Tensor::cat(vec![past, key], 2);
        let scores = query.matmul(keys.clone().transpose());
        let mask = Tensor::<2, Bool>::tril_mask([count, start + count], start as i64, &device);
        let scores = scores.mask_fill(mask.unsqueeze::<4>(), -1e9);
        let seen = softmax(scores, 3).matmul(keys.clone());
        Tensor::cat(vec![seen, keys], 2)
    }
}

#[test]
fn a_decoder_goes_on_after_a_past_of_any_length() {
    on_each(|device| {
        let decoder = Decoder::new(device);
        let of = |lengths: [usize; 2]| {
            let [past, new] = lengths;
            let past = tensor::<4>(past as u64, [2, 2, past, 4], device);
            (past, tensor::<3>(new as u64 + 7, [2, new, 8], device))
        };
        let forward = |decoder: &Decoder, inputs| decoder.forward(inputs);
        // One token after another.
        let past = OpenAxis::new("past", [(0, 2)]);
        let inputs = [[3, 1], [1, 1], [8, 1], [39, 1]].map(of);
        let exported = runs(&decoder, std::slice::from_ref(&past), &inputs, forward);
        assert_eq!(exported.model.outputs()[0].shape[2], open("past + 2"));
        // And several at once.
        let new = OpenAxis::new("new", [(1, 1)]);
        let inputs = [[3, 5], [1, 1], [6, 1], [2, 9], [7, 30]].map(of);
        runs(&decoder, &[past, new], &inputs, forward);
    });
}
