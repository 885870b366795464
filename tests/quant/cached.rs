//! Attentions and transformers, position by position.

use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderConfig, TransformerEncoder, TransformerEncoderConfig,
};
use burn::tensor::{Bool, Device, Tensor};
use burn_lean::quant::{
    ConvertConfig, ForwardQ, KvCache, KvFormat, QatConfig, QuantizedForward, calibrate,
    qat::{DecoderCache, TransformerDecoderInput, TransformerEncoderInput},
};

use crate::support::{on_each, tensor, values, with_numbers};

const BATCH: usize = 2;
const LENGTH: usize = 5;
const WIDTH: usize = 8;
const LAYERS: usize = 2;

fn encoder(norm_first: bool, device: &Device) -> TransformerEncoder {
    let config = TransformerEncoderConfig::new(WIDTH, 16, 2, LAYERS);
    with_numbers(config.with_norm_first(norm_first).init(device), 7)
}

fn decoder(norm_first: bool, device: &Device) -> TransformerDecoder {
    let config = TransformerDecoderConfig::new(WIDTH, 16, 2, LAYERS);
    with_numbers(config.with_norm_first(norm_first).init(device), 8)
}

fn sequence(device: &Device) -> Tensor<3> {
    tensor(1, [BATCH, LENGTH, WIDTH], device)
}

fn memory(device: &Device) -> (Tensor<3>, Tensor<2, Bool>) {
    let pad = Tensor::<2, Bool>::from_data([[false; 3], [true, false, false]], device);
    (tensor(2, [BATCH, 3, WIDTH], device), pad)
}

/// The positions of a range, of all batches.
fn part(x: &Tensor<3>, range: std::ops::Range<usize>) -> Tensor<3> {
    x.clone().slice([0..BATCH, range, 0..WIDTH])
}

/// True where a position of `range` must not see one of all until its end.
fn ahead(range: &std::ops::Range<usize>, device: &Device) -> Tensor<3, Bool> {
    let rows = range
        .clone()
        .map(|at| (0..range.end).map(move |of| of > at));
    let mask: Vec<bool> = rows.flatten().collect();
    let mask = Tensor::<1, Bool>::from_bool(mask.as_slice(), device);
    let mask = mask.reshape([1, range.len(), range.end]);
    mask.repeat_dim(0, BATCH)
}

fn ranges() -> [std::ops::Range<usize>; 3] {
    [0..2, 2..3, 3..LENGTH]
}

/// What the layers make of the whole sequence in parts.
fn in_parts(
    x: &Tensor<3>,
    mut forward: impl FnMut(Tensor<3>, Tensor<3, Bool>) -> Tensor<3>,
) -> Vec<f32> {
    let device = x.device();
    let parts = ranges().map(|range| {
        let mask = ahead(&range, &device);
        forward(part(x, range), mask)
    });
    values(Tensor::cat(parts.to_vec(), 1))
}

fn encoder_in_parts(model: &TransformerEncoder, x: &Tensor<3>, format: KvFormat) -> Vec<f32> {
    let mut caches = vec![KvCache::new(format); LAYERS];
    in_parts(x, |x, mask| {
        let input = TransformerEncoderInput::new(x).mask_attn(mask);
        model.forward_q((input, &mut caches[..]))
    })
}

fn decoder_in_parts(model: &TransformerDecoder, x: &Tensor<3>, format: KvFormat) -> Vec<f32> {
    let mut caches = vec![DecoderCache::new(format); LAYERS];
    in_parts(x, |x, mask| {
        let (memory, pad) = memory(&x.device());
        let input = TransformerDecoderInput::new(x, memory)
            .target_mask_attn(mask)
            .memory_mask_pad(pad);
        model.forward_q((input, &mut caches[..]))
    })
}

fn size(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// As near as sums in another order.
fn assert_same(found: &[f32], expected: &[f32]) {
    assert_near!(found.iter(), expected, 2e-5 * size(expected));
}

#[test]
fn burns_own_caches_give_the_same_last_positions() {
    on_each(|device| {
        let x = sequence(device);
        for norm_first in [false, true] {
            let model = encoder(norm_first, device);
            let mut cache = model.new_autoregressive_cache();
            let mut caches = vec![KvCache::default(); LAYERS];
            for position in 0..LENGTH {
                let so_far = 0..position + 1;
                let input = TransformerEncoderInput::new(part(&x, so_far.clone()))
                    .mask_attn(ahead(&so_far, device));
                let plain = model.forward_autoregressive_inference(input.into(), &mut cache);
                let last = TransformerEncoderInput::new(part(&x, position..position + 1));
                let found = model.forward_q((last, &mut caches[..]));
                let expected = part(&plain, position..position + 1);
                assert_same(&values(found), &values(expected));
            }

            let model = decoder(norm_first, device);
            let (memory, pad) = memory(device);
            let mut cache = model.new_autoregressive_cache();
            let mut caches = vec![DecoderCache::default(); LAYERS];
            for position in 0..LENGTH {
                let so_far = 0..position + 1;
                let input = |target| {
                    TransformerDecoderInput::new(target, memory.clone())
                        .memory_mask_pad(pad.clone())
                };
                let whole =
                    input(part(&x, so_far.clone())).target_mask_attn(ahead(&so_far, device));
                let plain = model.forward_autoregressive_inference(whole.into(), &mut cache);
                let last = input(part(&x, position..position + 1));
                let found = model.forward_q((last, &mut caches[..]));
                let expected = part(&plain, position..position + 1);
                assert_same(&values(found), &values(expected));
            }
        }
    });
}

/// A value that lies halfway between two points may fall to either, where a sum has another order: one
/// step of 8 bits of what follows.
fn assert_a_step_apart(found: &[f32], expected: &[f32]) {
    assert_near!(found.iter(), expected, 0.02 * size(expected));
}

#[test]
fn quantizers_take_part_in_every_position() {
    on_each(|device| {
        let x = sequence(device);
        let whole = TransformerEncoderInput::new(x.clone()).mask_attn(ahead(&(0..LENGTH), device));
        let prepared = QatConfig::new().prepare(encoder(true, device)).unwrap();
        let prepared = calibrate(prepared, |model| {
            model.forward_q(whole.clone());
        })
        .unwrap();
        let expected = values(prepared.forward_q(whole.clone()));
        let found = encoder_in_parts(&prepared, &x, KvFormat::Float);
        assert_a_step_apart(&found, &expected);
        // Weights alone, as Burn's own pass has it, are something else.
        let weights_alone = values(prepared.forward(whole.clone().into()));
        let off = |other: &[f32]| {
            let pairs = found.iter().zip(other);
            pairs.map(|(a, b)| (a - b).powi(2)).sum::<f32>()
        };
        assert!(off(&weights_alone) > 3.0 * off(&expected));

        let (converted, _) = ConvertConfig::new().convert(prepared).unwrap();
        let found = encoder_in_parts(&converted, &x, KvFormat::Float);
        assert_a_step_apart(&found, &expected);
    });
}

#[test]
fn keys_and_values_in_8_bits() {
    on_each(|device| {
        let x = sequence(device);
        let model = encoder(true, device);
        let [float, codes] =
            [KvFormat::Float, KvFormat::Int8].map(|format| encoder_in_parts(&model, &x, format));
        assert_ne!(float, codes);
        assert_a_step_apart(&codes, &float);

        let model = decoder(true, device);
        let [float, codes] =
            [KvFormat::Float, KvFormat::Int8].map(|format| decoder_in_parts(&model, &x, format));
        assert_ne!(float, codes);
        assert_a_step_apart(&codes, &float);
    });
}

/// Recorded, caches go in with the inputs and come back with the results.
#[test]
fn a_recorded_pass_takes_and_returns_the_caches() {
    on_each(|device| {
        let x = sequence(device);
        let model = decoder(true, device);
        let expected = decoder_in_parts(&model, &x, KvFormat::Int8);
        let recorded = QuantizedForward::new().cached();
        let mut caches = vec![DecoderCache::new(KvFormat::Int8); LAYERS];
        let found = in_parts(&x, |x, mask| {
            let (memory, pad) = memory(device);
            let input = (x, memory, pad, mask, std::mem::take(&mut caches));
            let step = recorded.run(
                &model,
                input,
                |model, (x, memory, pad, mask, mut caches)| {
                    let input = TransformerDecoderInput::new(x, memory)
                        .target_mask_attn(mask)
                        .memory_mask_pad(pad);
                    (model.forward_q((input, &mut caches[..])), caches)
                },
            );
            let (x, after) = step.unwrap();
            caches = after;
            x
        });
        assert_same(&found, &expected);
        assert_eq!(caches[0].target.positions(), LENGTH);
        assert_eq!(caches[LAYERS - 1].memory.positions(), 3);
    });
}
