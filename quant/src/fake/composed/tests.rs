//! One pass over memory and the composition of operations give the same bits.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::TensorData;

use super::*;
use crate::fake::kernel::Kernel;
use crate::{Granularity, NumberFormat};

const SHAPE: [usize; 3] = [4, 6, 10];

/// Numbers of all magnitudes around the grid, ties, and what is not finite.
fn inputs() -> Vec<f32> {
    let count = SHAPE.iter().product();
    let mut x: Vec<f32> = (0..count)
        .map(|index| {
            let sign = [1.0, -1.0][index % 2];
            sign * 0.125 * (index / 2) as f32 * f32::exp2((index % 13) as f32 - 6.0)
        })
        .collect();
    let special = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        -0.0,
        1e30,
        f32::MAX,
    ];
    x[100..106].copy_from_slice(&special);
    x
}

fn rules() -> Vec<Rule> {
    let granularities = [
        Granularity::PerTensor,
        Granularity::PerChannel { axis: 0 },
        Granularity::PerChannel { axis: 1 },
        Granularity::PerChannel { axis: 2 },
        Granularity::PerToken,
        Granularity::PerBlock {
            extents: vec![2, 3, 5],
        },
        Granularity::PerBlock {
            extents: vec![6, 1],
        },
        Granularity::PerBlock {
            extents: vec![1, 1, 1],
        },
    ];
    let formats = [
        NumberFormat::int8(),
        NumberFormat::uint8(),
        NumberFormat::int(2).narrow(),
        NumberFormat::uint(3),
        NumberFormat::E4M3,
        NumberFormat::E5M2,
        NumberFormat::E2M1,
    ];
    let rules = granularities.iter().flat_map(|granularity| {
        formats.iter().flat_map(move |format| {
            [None, Some(1.25)].map(|limit| Rule {
                grid: format.grid(),
                groups: Groups::new(granularity, &SHAPE).unwrap(),
                limit,
            })
        })
    });
    rules.collect()
}

fn tensor(values: Vec<f32>, shape: &[usize]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape.to_vec()))
}

/// `x`, scales and zero points of a rule.
fn operands(rule: &Rule) -> [FlexTensor; 3] {
    let count = rule.groups.count();
    let (min, max) = rule.grid.bounds();
    let scale = (0..count).map(|group| [0.5, 0.3, 2.0, 0.07][group % 4]);
    let zero_point = (0..count).map(|group| match rule.grid {
        Grid::Int { .. } => (min + group as f32).min(max),
        Grid::Float { .. } => 0.0,
    });
    [
        tensor(inputs(), &SHAPE),
        tensor(scale.collect(), &[count]),
        tensor(zero_point.collect(), &[count]),
    ]
}

fn bits(tensor: &FlexTensor) -> Vec<u32> {
    let values = tensor.to_contiguous();
    let values = values.as_slice::<f32>().unwrap().iter();
    let bits = values.map(|value| match *value {
        // All NaNs are alike, and so are the zeros of float formats: Flex rounds −0.5 to 0.
        value if value.is_nan() => u32::MAX,
        0.0 => 0,
        value => value.to_bits(),
    });
    bits.collect()
}

#[test]
fn values_and_masks_are_the_same_bit_by_bit() {
    for rule in rules() {
        let [x, scale, zero] = operands(&rule);
        let arguments = || (x.clone(), scale.clone(), zero.clone());
        let (x, s, z) = arguments();
        let (composed, clipped) = quantize_dequantize_masked::<Flex>(x, s, z, &rule);
        let (x, s, z) = arguments();
        let (in_memory, clipped_in_memory) = Flex::quantize_dequantize_masked(x, s, z, &rule);
        assert_eq!(bits(&composed), bits(&in_memory), "{rule:?}");
        assert_eq!(clipped.bytes(), clipped_in_memory.bytes(), "{rule:?}");

        let (x, s, z) = arguments();
        let composed = quantize_dequantize::<Flex>(x, s, z, &rule);
        let (x, s, z) = arguments();
        let unmasked = Flex::quantize_dequantize(x, s, z, &rule);
        assert_eq!(bits(&composed), bits(&in_memory), "{rule:?}");
        assert_eq!(bits(&unmasked), bits(&in_memory), "{rule:?}");
    }
}

#[test]
fn a_transposed_tensor_is_read_in_its_own_order() {
    for rule in rules() {
        let [x, scale, zero] = operands(&rule);
        // The same values, with the last axis outermost in memory.
        let strided = x.permute(&[2, 0, 1]).to_contiguous().permute(&[1, 2, 0]);
        assert!(strided.as_slice::<f32>().is_none());
        let y = Flex::quantize_dequantize(x, scale.clone(), zero.clone(), &rule);
        let strided = Flex::quantize_dequantize(strided, scale, zero, &rule);
        assert_eq!(bits(&y), bits(&strided));
    }
}

#[test]
fn gradients_of_both_agree() {
    for rule in rules() {
        for clip in [Clip::AfterRounding, Clip::BeforeRounding] {
            let [x, scale, zero] = operands(&rule);
            let finite = inputs()
                .into_iter()
                .map(|x| if x.abs() < 1e6 { x } else { 1.0 });
            let x = tensor(finite.collect(), x.layout().shape());
            let dy = (0..x.layout().num_elements()).map(|index| (index % 7) as f32 - 3.0);
            let dy = tensor(dy.collect(), x.layout().shape());
            let operands = || (x.clone(), scale.clone(), zero.clone(), dy.clone());
            let of = |zero_point: bool| {
                let wanted = Wanted { clip, zero_point };
                let (x, scale, zero, dy) = operands();
                let composed = learned_gradients::<Flex>(x, scale, zero, dy, &rule, wanted);
                let (x, scale, zero, dy) = operands();
                let in_memory = Flex::learned_gradients(x, scale, zero, dy, &rule, wanted);
                assert_eq!(bits(&composed.x), bits(&in_memory.x), "{rule:?}");
                [composed, in_memory]
            };
            let [composed, in_memory] = of(true);
            for (without, with) in of(false).iter().zip([&composed, &in_memory]) {
                assert!(without.zero_point.is_none());
                assert_eq!(bits(&without.x), bits(&with.x));
                assert_eq!(bits(&without.scale), bits(&with.scale));
            }
            let composed = [composed.scale, composed.zero_point.unwrap()];
            let in_memory = [in_memory.scale, in_memory.zero_point.unwrap()];
            // Sums of up to 240 terms of at most 3 times the widest number or scale: each addition
            // rounds by 2⁻²⁴ of the sum so far.
            let (min, max) = rule.grid.bounds();
            for (composed, in_memory) in composed.iter().zip(&in_memory) {
                let (composed, in_memory) = (composed.storage::<f32>(), in_memory.storage::<f32>());
                for (a, b) in composed.iter().zip(in_memory) {
                    let largest_sum = 240.0 * 3.0 * (max - min);
                    let tolerance = 240.0 * largest_sum * f32::EPSILON / 2.0;
                    assert!((a - b).abs() <= tolerance, "{rule:?}: {a} and {b}");
                }
            }
        }
    }
}

#[test]
fn ranges_of_both_agree() {
    for rule in rules() {
        // Flex's own minimum drops NaN, ours does not.
        let numbers = inputs()
            .into_iter()
            .map(|x| if x.is_nan() { 0.0 } else { x });
        let x = tensor(numbers.collect(), &SHAPE);
        let composed = range::<Flex>(x.clone(), &rule.groups);
        let in_memory = Flex::range(x, &rule.groups);
        assert_eq!(bits(&composed.0), bits(&in_memory.0));
        assert_eq!(bits(&composed.1), bits(&in_memory.1));
    }
}
