//! Ranges of whole tensors: of any length, of views, and where not all numbers are finite; and of weights that no data
//! comes by.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_lean::quant::{
    Learned, Mapping, NumberFormat, ObserverConfig, PtqConfig, PtqMode, QatConfig, Scheme,
    WeightConfig, fake::Range, quantized_weights,
};

use crate::support::{each_device, numbers, on_each, tensor, values, with_numbers};

/// The lowest and the highest number, or NaN where one is.
fn bounds(numbers: &[f32]) -> [f32; 2] {
    let bound = |of: fn(f32, f32) -> f32| numbers.iter().copied().reduce(of).unwrap();
    match numbers.iter().any(|x| x.is_nan()) {
        true => [f32::NAN; 2],
        false => [bound(f32::min), bound(f32::max)],
    }
}

/// All NaNs are alike.
fn bits(numbers: [f32; 2]) -> [u32; 2] {
    numbers.map(|x| match x.is_nan() {
        true => u32::MAX,
        false => x.to_bits(),
    })
}

fn range<const D: usize>(x: &Tensor<D>) -> [f32; 2] {
    let range = Range::of(x, &Scheme::affine(NumberFormat::uint8())).unwrap();
    [values(range.min)[0], values(range.max)[0]]
}

fn on_device(x: &[f32], device: &Device) -> Tensor<1> {
    let data = TensorData::new(x.to_vec(), [x.len()]);
    Tensor::from_data(data, (device, DType::F32))
}

#[test]
fn every_number_counts_whatever_the_length() {
    each_device(|target| {
        for count in [1, 2, 31, 16_384, 16_385, 1_000_003] {
            let plain = numbers(3, count);
            let last = |value: f32| {
                let mut x = plain.clone();
                x[count - 1] = value;
                x
            };
            let negative = plain.iter().map(|x| -x.abs() - 0.5).collect();
            for x in [
                last(7.0),
                last(-7.0),
                last(f32::NAN),
                last(-f32::NAN),
                last(f32::INFINITY),
                last(f32::NEG_INFINITY),
                vec![0.75; count],
                negative,
            ] {
                let found = range(&on_device(&x, &target.device));
                let expected = bounds(&x);
                assert_eq!(bits(found), bits(expected), "{} {count}", target.name);
            }
        }
    });
}

#[test]
fn a_view_has_the_range_of_what_it_shows() {
    on_each(|device| {
        // The ends of the whole are beyond those of the views.
        let mut all = numbers(5, 60 * 70);
        all[0] = 9.0;
        all[60 * 70 - 1] = -9.0;
        let x = on_device(&all, device).reshape([60, 70]);
        assert_eq!(range(&x.clone().transpose()), [-9.0, 9.0]);
        for view in [
            x.clone().slice([1..59, 0..70]),
            x.clone().slice([1..60, 3..60]),
            x.clone().slice([2..3, 0..70]).expand([60, 70]),
            x.transpose().slice([3..60, 1..60]),
        ] {
            let shown = bounds(&values(view.clone()));
            assert!(shown[0] > -9.0 && shown[1] < 9.0);
            assert_eq!(range(&view), shown);
        }
    });
}

/// As the pooler of an encoder whose head does not read it: its weight is rounded to nearest, remembering or not.
#[test]
fn a_layer_that_no_batch_comes_by_takes_the_range_of_its_weight() {
    let device = Device::flex();
    let layer = |seed| with_numbers(LinearConfig::new(8, 8).init(&device), seed);
    let model: Vec<Linear> = vec![layer(1), layer(2)];
    let x = tensor::<2>(3, [32, 8], &device);
    let quantized = |weight, mode| {
        let config = PtqConfig::new()
            .with_quantize(QatConfig::new().with_weight(weight))
            .with_mode(mode)
            .with_progress(false);
        let first = |model: &Vec<Linear>, x| model[0].forward(x);
        config.quantize_for(model.clone(), || [x.clone()], first)
    };
    let of_bits = WeightConfig::int;
    let remembers = || of_bits(8).with_observer(ObserverConfig::MinMax);
    let learned = remembers().with_mapping(Mapping::Affine);
    for (bits, weight, mode) in [
        (8, of_bits(8), PtqMode::Static),
        (4, of_bits(4), PtqMode::Static),
        (8, remembers(), PtqMode::Static),
        (8, remembers(), PtqMode::WeightOnly),
        (8, learned.with_learned(Learned::Lsq), PtqMode::WeightOnly),
    ] {
        let (prepared, _) = quantized(weight, mode).unwrap();
        let codes = quantized_weights(&prepared).unwrap();
        let (path, uncalled) = &codes[1];
        assert_eq!(path, "1.weight");
        let rounded: Tensor<2> = uncalled.dequantize(&device).unwrap();
        let noise = rounded - model[1].weight.val();
        let largest = values(model[1].weight.val().abs());
        let step = largest.into_iter().fold(0.0, f32::max) / (1 << (bits - 1)) as f32;
        assert!(values(noise.abs()).into_iter().all(|off| off < 1.5 * step));
    }
}
