//! Keys and values in 8 bits.

use burn::tensor::activation::softmax;
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{KvCache, KvFormat};

use crate::checkpoints::near;
use crate::llama::Cache;
use crate::support::{each_device, farthest, tensor, values};
use crate::{small_llama, tokens};

const SHAPE: [usize; 4] = [2, 3, 5, 8];

/// Largest magnitude of each row over 127.
fn scales(x: &[f32]) -> Vec<f32> {
    let rows = x.chunks(SHAPE[3]);
    rows.map(|row| row.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0)
        .collect()
}

#[test]
fn no_number_is_off_by_more_than_half_a_scale() {
    each_device(|target| {
        for size in [1.0, 3e4] {
            // Rows of all sizes, and one of zeros.
            let sizes = Tensor::<1>::from_floats([1.0, 1e-3, 0.0, 30.0, 1.0], &target.device);
            let x = tensor::<4>(3, SHAPE, &target.device) * sizes.reshape([1, 1, 5, 1]) * size;
            let mut cache = KvCache::new(KvFormat::Int8);
            let (keys, other) = cache.extend(x.clone(), -x.clone());
            near(&values(keys.clone()), &values(-other));
            let (x, keys) = (values(x), values(keys));
            let scales = scales(&x);
            for (at, (x, key)) in x.iter().zip(&keys).enumerate() {
                let scale = scales[at / SHAPE[3]];
                // Half a scale, and the rounding of quotient and product.
                assert!((x - key).abs() <= 0.5 * scale + 1e-6 * x.abs(), "{x} {key}");
            }
            assert!(keys.iter().all(|key| key.is_finite()));
        }
    });
}

#[test]
fn position_by_position_is_all_at_once_to_the_bit() {
    each_device(|target| {
        for format in [KvFormat::Float, KvFormat::Int8] {
            let [keys, other] = [3, 4].map(|seed| tensor::<4>(seed, SHAPE, &target.device));
            let mut whole = KvCache::new(format);
            let (all_keys, all_values) = whole.extend(keys.clone(), other.clone());
            let mut cache = KvCache::new(format);
            let mut last = None;
            for range in [0..2, 2..3, 3..5] {
                assert_eq!(cache.positions(), range.start);
                let part = |x: &Tensor<4>| x.clone().slice([0..2, 0..3, range.clone()]);
                last = Some(cache.extend(part(&keys), part(&other)));
            }
            let (found_keys, found_values) = last.unwrap();
            assert_eq!(values(all_keys), values(found_keys));
            assert_eq!(values(all_values), values(found_values));
            assert_eq!((cache.positions(), whole.positions()), (5, 5));
            assert_eq!(cache.bytes(), whole.bytes());
        }
    });
}

#[test]
fn an_attention_is_off_by_what_its_scales_allow() {
    let device = Device::flex();
    let [query, keys, x] = [5, 6, 7].map(|seed| tensor::<4>(seed, SHAPE, &device));
    let attend = |keys: Tensor<4>, x: Tensor<4>| {
        let scores = query.clone().matmul(keys.transpose()) / (SHAPE[3] as f64).sqrt();
        values(softmax(scores, 3).matmul(x))
    };
    let exact = attend(keys.clone(), x.clone());
    let mut cache = KvCache::new(KvFormat::Int8);
    let (rounded_keys, rounded) = cache.extend(keys.clone(), x.clone());
    let found = attend(rounded_keys, rounded);
    // A score moves by at most δ = |q|₁ · scale / 2 / √d, a weight of the softmax by a factor of at
    // most e^(2δ), and a value by half its scale.
    let largest = |x: Vec<f32>| x.into_iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let scale = |x: &Tensor<4>| largest(scales(&values(x.clone())));
    let sums = largest(values(query.clone().abs().sum_dim(3)));
    let delta = sums * scale(&keys) / 2.0 / (SHAPE[3] as f32).sqrt();
    let bound = ((2.0 * delta).exp() - 1.0) * largest(values(x.clone())) + 0.5 * scale(&x);
    let off = farthest(&found, &exact);
    assert!(off > 0.0 && off <= bound, "{off} of {bound}");
}

#[test]
fn generation_with_8_bits_is_the_uncached_pass_with_rounded_keys_and_values() {
    each_device(|target| {
        let device = &target.device;
        let model = small_llama(device);
        let batch = tokens(device).remove(1);
        let mut cache = Cache::new(KvFormat::Int8);
        let whole = values(model.forward_cache(batch.clone(), &mut cache));
        let mut steps = Cache::new(KvFormat::Int8);
        let parts = [0..5, 5..6, 6..7, 7..16]
            .map(|range| model.forward_cache(batch.clone().slice([0..2, range]), &mut steps));
        near(&whole, &values(Tensor::cat(parts.to_vec(), 1)));
        let float = values(model.forward(batch));
        assert!(float.iter().zip(&whole).any(|(a, b)| (a - b).abs() > 1e-5));
        // 2 blocks, 2 windows, 2 heads, 16 positions of 4 numbers, keys and values.
        let rows = 2 * 2 * 2 * 16 * 2;
        let code = (cache.bytes() / rows - 4) / 4;
        assert_eq!(cache.bytes(), rows * (4 * code + 4));
        if target.name == "flex" {
            assert_eq!(code, 1);
        }
    });
}

/// The scale of all positions but one is no normal number, or 0.
#[test]
fn numbers_near_nothing_are_zeros() {
    each_device(|target| {
        let sizes = Tensor::<1>::from_floats([1e-44, 1e-38, 1e-36, 1.0, 0.0], &target.device);
        let x = tensor::<4>(3, SHAPE, &target.device) * sizes.reshape([1, 1, 5, 1]);
        let mut cache = KvCache::new(KvFormat::Int8);
        let (keys, _) = cache.extend(x.clone(), x.clone());
        let (x, keys) = (values(x), values(keys));
        let scales = scales(&x);
        for (at, (x, key)) in x.iter().zip(&keys).enumerate() {
            let row = at / SHAPE[3];
            match row % SHAPE[2] {
                // Half a scale, and the rounding of quotient and product.
                3 => assert!(
                    (x - key).abs() <= 0.5 * scales[row] + 1e-6 * x.abs(),
                    "{x} {key}"
                ),
                _ => assert_eq!(*key, 0.0, "{x}"),
            }
        }
    });
}
