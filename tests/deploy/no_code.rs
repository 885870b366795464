//! What has no code, where something is rounded that no product reads.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::deploy::Backend;
use burn_lean::quant::{
    FakeQuantizeConfig, ForwardQ, NumberFormat, PtqConfig, PtqMode, QatConfig, QuantizedForward,
    Scheme, calibrate,
};

use crate::judge::within_steps;
use crate::on_the_fly::compiled;
use crate::quantized::lost;
use crate::support::{tensor, values, with_numbers};

const WIDTH: usize = 16;

/// The same rows with another number in the second one.
fn with_number(x: &Tensor<2>, number: f32) -> Tensor<2> {
    let mut numbers = values(x.clone());
    numbers[WIDTH + 7] = number;
    Tensor::from_data(TensorData::new(numbers, x.dims()), &x.device())
}

#[test]
fn a_row_without_a_code_is_lost_alone_where_outputs_are_rounded() {
    let device = Device::flex();
    let x = tensor::<2>(5, [3, WIDTH], &device);
    let forward = |linear: &Linear, x: Tensor<2>| linear.forward_q(x);
    for scheme in [
        Scheme::affine(NumberFormat::uint8()),
        // Its zero point has a sign.
        Scheme::symmetric(NumberFormat::int8()),
        // The values saturate before.
        Scheme::symmetric(NumberFormat::int(4)),
    ] {
        let config = QatConfig::new()
            .with_activation(Some(FakeQuantizeConfig::new(scheme.clone())))
            .with_outputs(true);
        let linear: Linear = with_numbers(LinearConfig::new(WIDTH, 5).init(&device), 3);
        let linear = config.prepare(linear).unwrap();
        let linear = calibrate(linear, |linear| drop(forward(linear, x.clone()))).unwrap();
        let engine = compiled(&linear, &x, forward, Backend::Own);
        let found = engine.run(&x).unwrap();
        let step = 255.0 / (scheme.quant_max() - scheme.quant_min());
        within_steps(found, forward(&linear, x.clone()), 4.0 * step);
        let found = engine.run(&with_number(&x, f32::NAN)).unwrap();
        assert_eq!(lost(values(found), 3), [false, true, false], "{scheme}");
    }
}

#[test]
fn rounded_operands_of_a_sum_are_the_ends_of_a_known_grid_or_lost() {
    let device = Device::flex();
    let x = tensor::<2>(5, [3, WIDTH], &device);
    let forward = |linear: &Linear, x: Tensor<2>| x.clone() + linear.forward(x);
    for mode in [PtqMode::Static, PtqMode::Dynamic] {
        let config = PtqConfig::new()
            .with_quantize(QatConfig::new().with_sums(true))
            .with_mode(mode)
            .with_progress(false);
        let linear: Linear = with_numbers(LinearConfig::new(WIDTH, WIDTH).init(&device), 3);
        let quantized = config.quantize_for(linear, || [x.clone()], forward);
        let (linear, _) = quantized.unwrap();
        let engine = compiled(&linear, &x, forward, Backend::Own);
        let run = |number| values(engine.run(&with_number(&x, number)).unwrap());
        let fake = QuantizedForward::new().run(&linear, x.clone(), forward);
        within_steps(engine.run(&x).unwrap(), fake.unwrap(), 2.0);
        assert_eq!(lost(run(f32::NAN), 3), [false, true, false], "{mode:?}");
        for (infinity, far) in [(f32::INFINITY, 1e3), (f32::NEG_INFINITY, -1e3)] {
            match mode {
                PtqMode::Static => assert_eq!(run(infinity), run(far)),
                _ => assert_eq!(lost(run(infinity), 3), [false, true, false]),
            }
        }
    }
}
