//! Values and gradients of fake quantization.

use burn::tensor::Tensor;
use burn_lean::quant::{Granularity, NumberFormat, QuantParams, Scheme, fake_quantize};

use crate::support::{each_device, values};

#[test]
fn blocks_are_quantized_with_their_own_scale() {
    each_device(|target| {
        let scheme =
            Scheme::symmetric(NumberFormat::int(4)).with_granularity(Granularity::PerBlock {
                extents: vec![2, 1],
            });
        let x = Tensor::<2>::from_floats(
            [[0.6, 0.6], [1.4, 1.4], [0.6, 0.6], [1.4, 1.4]],
            &target.device,
        );
        let scale = Tensor::from_floats([1.0, 0.5, 0.25, 2.0], &target.device);
        let y = fake_quantize(x, &QuantParams::symmetric(scale, &scheme), &scheme);
        assert_eq!(values(y), [1.0, 0.5, 1.0, 1.5, 0.5, 0.0, 1.5, 2.0]);
    });
}
