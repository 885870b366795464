//! `forward_q` of every layer.

use burn::module::Module;
use burn::nn::attention::{
    CrossAttention, CrossAttentionConfig, MultiHeadAttention, MultiHeadAttentionConfig,
};
use burn::nn::conv::{
    Conv1dConfig, Conv2dConfig, Conv3dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig,
    ConvTranspose3dConfig, DeformConv2dConfig,
};
use burn::nn::gru::{BiGru, BiGruConfig, GruConfig};
use burn::nn::transformer::{
    PositionWiseFeedForwardConfig, TransformerDecoder, TransformerDecoderConfig,
    TransformerEncoderConfig,
};
use burn::nn::{
    BiLstmConfig, BiRnn, BiRnnConfig, EmbeddingConfig, LinearConfig, Lstm, LstmConfig, LstmState,
    Rnn, RnnConfig, RnnState,
};
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_lean::quant::{
    ConvertConfig, FakeQuantizeConfig, ForwardQ, NumberFormat, ObserverConfig, Override, QatConfig,
    QuantParams, QuantizedForward, Scheme, Site, advance, calibrate, fake_quantize,
    module::map_quantizers,
    qat::{MhaInput, TransformerDecoderInput, TransformerEncoderInput},
    quantizers,
};

use crate::support::{on_each, on_tracked, tensor, values, with_numbers};

/// The numbers of the plain layer: to the bit, but where fusion compiles the steps of a recurrent
/// layer with other neighbours, which the rounding of a sum shows.
fn assert_plain(found: &[f32], expected: &[f32], what: &str) {
    if !cfg!(feature = "fusion") {
        assert_eq!(found, expected, "{what}");
    }
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        let close = (found - expected).abs() <= 4.0 * f32::EPSILON;
        assert!(close, "{what}: {found} for {expected}");
    }
}

/// The same bits without quantizers and with all of them switched off; with them on, other numbers
/// and every quantizer has a range.
fn assert_layer<M: Module>(
    layer: M,
    plain: impl Fn(&M) -> Vec<f32>,
    quantized: impl Fn(&M) -> Vec<f32>,
) {
    let layer = with_numbers(layer, 7);
    let expected = plain(&layer);
    assert_plain(&quantized(&layer), &expected, "not prepared");
    // All of a sequence counts, not its first steps most.
    let scheme = Scheme::affine(NumberFormat::uint8());
    let activation = FakeQuantizeConfig::new(scheme).with_observer(ObserverConfig::MinMax);
    let config = QatConfig::new().with_activation(Some(activation));
    let prepared = config.prepare(layer).unwrap();
    let off = map_quantizers(prepared.clone(), |at| at.quantizer.with_enabled(false));
    assert_plain(&quantized(&off), &expected, "switched off");

    let prepared = calibrate(prepared, |layer| {
        assert_plain(&quantized(layer), &expected, "in a calibration");
    })
    .unwrap();
    let found = quantized(&prepared);
    assert_ne!(found, expected);
    let scale = expected
        .iter()
        .fold(0.0f32, |all, value| all.max(value.abs()));
    // INT8 keeps two digits; a layer that is wired wrongly is off by its whole range.
    assert_near!(found.iter(), &expected, 0.1 * scale);
    for located in quantizers(&prepared) {
        assert!(located.quantizer.is_observed(), "{}", located.path);
    }
}

/// [`assert_layer`] of a layer that takes one tensor.
macro_rules! assert_layer {
    ($layer:expr, $x:ident) => {
        assert_layer(
            $layer,
            |layer| values(layer.forward($x.clone())),
            |layer| values(layer.forward_q($x.clone())),
        )
    };
}

#[test]
fn a_deformable_convolution_has_no_quantizer_that_no_call_reaches() {
    let conv = DeformConv2dConfig::new([2, 2], [3, 3]).init(&Device::flex());
    let prepared = QatConfig::new().prepare(conv).unwrap();
    let sites: Vec<Site> = quantizers(&prepared).iter().map(|q| q.site).collect();
    assert_eq!(sites, [Site::Weight]);
}

#[test]
fn linear_layers_and_convolutions() {
    on_each(|device| {
        let x = tensor::<3>(1, [2, 3, 4], device);
        assert_layer!(LinearConfig::new(4, 5).init(device), x);
        let x = tensor::<3>(1, [2, 3, 6], device);
        assert_layer!(Conv1dConfig::new(3, 4, 3).init(device), x);
        assert_layer!(ConvTranspose1dConfig::new([3, 4], 3).init(device), x);
        let x = tensor::<4>(1, [2, 3, 5, 4], device);
        assert_layer!(Conv2dConfig::new([3, 4], [3, 2]).init(device), x);
        assert_layer!(ConvTranspose2dConfig::new([3, 4], [3, 2]).init(device), x);
        let x = tensor::<5>(1, [1, 2, 3, 3, 3], device);
        assert_layer!(Conv3dConfig::new([2, 2], [2, 2, 2]).init(device), x);
        assert_layer!(
            ConvTranspose3dConfig::new([2, 2], [2, 2, 2]).init(device),
            x
        );
    });
}

#[test]
fn embeddings_quantize_their_rows() {
    on_each(|device| {
        let tokens = Tensor::<2, Int>::from_data([[1, 0], [4, 2]], device);
        assert_layer!(EmbeddingConfig::new(5, 3).init(device), tokens);
    });
}

fn masks(device: &Device) -> (Tensor<2, Bool>, Tensor<3, Bool>) {
    let pad = Tensor::<2, Bool>::from_data([[false, false, true], [false; 3]], device);
    let ahead = [[false, true, true], [false, false, true], [false; 3]];
    (pad, Tensor::<3, Bool>::from_data([ahead, ahead], device))
}

#[test]
fn attention_with_masks_and_either_softmax() {
    on_each(|device| {
        let (pad, ahead) = masks(device);
        let x = tensor::<3>(1, [2, 3, 4], device);
        let memory = tensor::<3>(2, [2, 3, 4], device);
        for quiet in [false, true] {
            let input = || {
                MhaInput::new(x.clone(), memory.clone(), memory.clone())
                    .mask_pad(pad.clone())
                    .mask_attn(ahead.clone())
            };
            assert_layer(
                MultiHeadAttentionConfig::new(4, 2)
                    .with_quiet_softmax(quiet)
                    .init(device),
                |layer: &MultiHeadAttention| {
                    let output = layer.forward(input().into());
                    [values(output.weights), values(output.context)].concat()
                },
                |layer| {
                    let output = layer.forward_q(input());
                    [values(output.weights), values(output.context)].concat()
                },
            );
        }
    });
}

#[test]
fn both_products_of_an_attention_have_quantized_operands() {
    on_each(|device| {
        let x = tensor::<3>(1, [2, 3, 4], device);
        let layer = with_numbers(MultiHeadAttentionConfig::new(4, 2).init(device), 3);
        let prepared = QatConfig::new().prepare(layer).unwrap();
        let sites: Vec<_> = quantizers(&prepared)
            .into_iter()
            .filter(|located| !matches!(located.site, Site::Weight | Site::Input))
            .map(|located| located.name())
            .collect();
        assert_eq!(
            sites,
            [
                "output of `query`",
                "attention of `query`",
                "output of `key`",
                "output of `value`"
            ]
        );
        let prepared = calibrate(prepared, |layer| {
            layer.forward_q(MhaInput::self_attn(x.clone()));
        })
        .unwrap();
        let output = prepared.forward_q(MhaInput::self_attn(x));
        let located = quantizers(&prepared);
        let attention = located.iter().find(|at| at.site == Site::Attention);
        let quantizer = &attention.unwrap().quantizer;
        // What the product with v sees lies on the grid of the quantizer.
        let qparams: QuantParams = quantizer.qparams().unwrap();
        let weights = output.weights;
        let again = fake_quantize(weights.clone(), &qparams, quantizer.scheme());
        assert_eq!(values(again), values(weights));
    });
}

#[test]
fn transformer_encoders_with_the_norm_first_or_last() {
    on_each(|device| {
        let (pad, ahead) = masks(device);
        let x = tensor::<3>(1, [2, 3, 4], device);
        assert_layer!(PositionWiseFeedForwardConfig::new(4, 6).init(device), x);
        for norm_first in [false, true] {
            let input = || {
                TransformerEncoderInput::new(x.clone())
                    .mask_pad(pad.clone())
                    .mask_attn(ahead.clone())
            };
            assert_layer(
                TransformerEncoderConfig::new(4, 8, 2, 2)
                    .with_norm_first(norm_first)
                    .init(device),
                |layer| values(layer.forward(input().into())),
                |layer| values(layer.forward_q(input())),
            );
        }
    });
}

fn decoder_input(device: &Device) -> TransformerDecoderInput {
    let (pad, ahead) = masks(device);
    let memory_pad = Tensor::<2, Bool>::from_data([[false; 3], [true, false, false]], device);
    let memory = [[false, false, true], [false; 3], [true, false, false]];
    TransformerDecoderInput::new(
        tensor::<3>(1, [2, 3, 4], device),
        tensor::<3>(2, [2, 3, 4], device),
    )
    .target_mask_pad(pad)
    .target_mask_attn(ahead)
    .memory_mask_pad(memory_pad)
    .memory_mask_attn(Tensor::from_data([memory, memory], device))
}

#[test]
fn transformer_decoders_with_the_norm_first_or_last() {
    on_each(|device| {
        for norm_first in [false, true] {
            let input = || decoder_input(device);
            assert_layer(
                TransformerDecoderConfig::new(4, 8, 2, 2)
                    .with_norm_first(norm_first)
                    .init(device),
                |layer: &TransformerDecoder| values(layer.forward(input().into())),
                |layer| values(layer.forward_q(input())),
            );
        }
    });
}

/// What the documentation of `ForwardQ` says about it.
#[test]
fn a_cross_attention_is_quantized_in_its_weights_only() {
    let device = Device::flex();
    let config = CrossAttentionConfig::new(4, 6, 2, 1, 4).with_dropout(0.0);
    let plain = with_numbers(config.init(&device), 7);
    let query = tensor::<3>(1, [2, 3, 4], &device);
    let context = tensor::<3>(2, [2, 5, 6], &device);
    let forward =
        |layer: &CrossAttention| values(layer.forward(query.clone(), context.clone(), None));
    let convert = |config: QatConfig| {
        let prepared = config.prepare(plain.clone()).unwrap();
        assert_ne!(forward(&prepared), forward(&plain));
        let expected = forward(&prepared);
        let converted = ConvertConfig::new().convert(prepared);
        converted.map(|(converted, _)| assert_eq!(forward(&converted), expected))
    };
    let error = convert(QatConfig::new()).unwrap_err().into_error();
    assert_says!(error, "`query`");
    let leave_out = Override::new("**".into()).with_skip_activation(Some(true));
    convert(QatConfig::new().with_overrides(vec![leave_out])).unwrap();
}

#[test]
fn simple_recurrent_layers_in_all_their_variants() {
    on_each(|device| {
        let x = tensor::<3>(1, [2, 3, 4], device);
        let all = |(output, state): (Tensor<3>, RnnState<2>)| {
            [values(output), values(state.hidden)].concat()
        };
        let plain = RnnConfig::new(4, 5, true);
        let variants = [
            (plain.clone(), true),
            (plain.clone().with_reverse(true), false),
            (RnnConfig::new(4, 5, false).with_clip(Some(0.2)), false),
        ];
        for (config, with_state) in variants {
            let state = || with_state.then(|| RnnState::new(tensor(2, [2, 5], device)));
            assert_layer(
                config.init(device),
                |layer: &Rnn| all(layer.forward(x.clone(), state())),
                |layer| all(layer.forward_q((x.clone(), state()))),
            );
        }
        let turned = x.clone().swap_dims(0, 1);
        assert_layer(
            plain.with_batch_first(false).init(device),
            |layer| all(layer.forward(turned.clone(), None)),
            |layer| all(layer.forward_q((turned.clone(), None))),
        );
    });
}

#[test]
fn recurrent_layers_in_both_directions() {
    on_each(|device| {
        for batch_first in [true, false] {
            for with_state in [true, false] {
                let x = tensor::<3>(1, [2, 3, 4], device);
                let x = || match batch_first {
                    true => x.clone(),
                    false => x.clone().swap_dims(0, 1),
                };
                let state = |seed| tensor::<3>(seed, [2, 2, 5], device);
                let rnn_state = || with_state.then(|| RnnState::new(state(2)));
                let all = |(output, state): (Tensor<3>, RnnState<3>)| {
                    [values(output), values(state.hidden)].concat()
                };
                assert_layer(
                    BiRnnConfig::new(4, 5, true)
                        .with_batch_first(batch_first)
                        .init(device),
                    |layer: &BiRnn| all(layer.forward(x(), rnn_state())),
                    |layer| all(layer.forward_q((x(), rnn_state()))),
                );
                let lstm_state = || with_state.then(|| LstmState::new(state(2), state(3)));
                let all = |(output, state): (Tensor<3>, LstmState<3>)| {
                    [values(output), values(state.cell), values(state.hidden)].concat()
                };
                assert_layer(
                    BiLstmConfig::new(4, 5, true)
                        .with_batch_first(batch_first)
                        .init(device),
                    |layer| all(layer.forward(x(), lstm_state())),
                    |layer| all(layer.forward_q((x(), lstm_state()))),
                );
                let gru_state = || with_state.then(|| state(2));
                let all = |(output, state)| [values(output), values::<3>(state)].concat();
                assert_layer(
                    BiGruConfig::new(4, 5, true)
                        .with_batch_first(batch_first)
                        .init(device),
                    |layer: &BiGru| all(layer.forward(x(), gru_state())),
                    |layer| all(layer.forward_q((x(), gru_state()))),
                );
            }
        }
    });
}

#[test]
fn recurrent_layers_in_all_their_variants() {
    on_each(|device| {
        let x = tensor::<3>(1, [2, 3, 4], device);
        let state = || {
            LstmState::new(
                tensor::<2>(2, [2, 5], device),
                tensor::<2>(3, [2, 5], device),
            )
        };
        let all = |(output, state): (Tensor<3>, LstmState<2>)| {
            [values(output), values(state.cell), values(state.hidden)].concat()
        };
        let plain = LstmConfig::new(4, 5, true);
        let variants = [
            (plain.clone(), true),
            (plain.clone().with_reverse(true), false),
            (plain.clone().with_input_forget(true), true),
            (LstmConfig::new(4, 5, false).with_clip(Some(0.2)), false),
        ];
        for (config, with_state) in variants {
            let state = || with_state.then(state);
            assert_layer(
                config.init(device),
                |layer| all(layer.forward(x.clone(), state())),
                |layer| all(layer.forward_q((x.clone(), state()))),
            );
        }
        let steps_first = plain.with_batch_first(false).init(device);
        let turned = x.clone().swap_dims(0, 1);
        assert_layer(
            steps_first,
            |layer| all(layer.forward(turned.clone(), None)),
            |layer| all(layer.forward_q((turned.clone(), None))),
        );
        for reset_after in [true, false] {
            let hidden = || Some(tensor::<2>(2, [2, 5], device));
            assert_layer(
                GruConfig::new(4, 5, true)
                    .with_reset_after(reset_after)
                    .init(device),
                |layer| values(layer.forward(x.clone(), hidden())),
                |layer| values(layer.forward_q((x.clone(), hidden()))),
            );
        }
    });
}

/// A step does not know of later ones, as in a recorded forward pass.
#[test]
fn each_step_of_a_recurrent_layer_has_a_range_of_the_values_at_hand() {
    on_each(|device| {
        let magnitudes = [1.0, 3.0, 10.0, 30.0, 100.0, 1e3];
        let magnitudes = Tensor::<1>::from_floats(magnitudes, device).reshape([1, 6, 1]);
        let x = tensor::<3>(5, [2, 6, 4], device) * magnitudes;
        let activation = FakeQuantizeConfig::new(Scheme::symmetric(NumberFormat::int8()))
            .with_observer(ObserverConfig::Memoryless);
        let config = QatConfig::new().with_activation(Some(activation));
        let lstm = with_numbers(LstmConfig::new(4, 5, true).init(device), 1);
        let lstm: Lstm = config.prepare(lstm).unwrap();
        let found = lstm.forward_q((x.clone(), None)).0;
        // The state may lie between two codes of the next step: one of 1/127 and less, of which little is left
        // behind weights and gates.
        let first = lstm.forward_q((x.clone().narrow(1, 0, 2), None)).0;
        let beginning = values(found.clone().narrow(1, 0, 2));
        assert_near!(values(first).iter(), &beginning, 0.01);
        let recorded = QuantizedForward::new()
            .run(&lstm, x, |lstm, x| lstm.forward(x, None).0)
            .unwrap();
        let recorded = values(recorded);
        assert_near!(values(found).iter(), &recorded, 0.01);
    });
}

#[test]
fn gradients_reach_all_weights_of_an_attention_and_a_recurrent_layer() {
    use crate::support::gradients;
    use burn::optim::GradientsParams;
    on_tracked(|device| {
        let x = tensor::<3>(1, [2, 3, 4], &device);
        let lstm = with_numbers(LstmConfig::new(4, 5, true).init(&device), 1);
        let lstm = advance(QatConfig::new().prepare(lstm).unwrap());
        let (output, _) = lstm.forward_q((x.clone(), None));
        let grads = output.square().sum().backward();
        let found = gradients(&lstm, GradientsParams::from_grads(grads, &lstm));
        assert_eq!(found.len(), 4 * 2 * 2);

        let config = MultiHeadAttentionConfig::new(4, 2).with_dropout(0.0);
        let mha = with_numbers(config.init(&device), 1);
        let mha = QatConfig::new().prepare(mha).unwrap();
        let output = mha.forward_q(MhaInput::self_attn(x));
        let grads = output.context.square().sum().backward();
        let found = gradients(&mha, GradientsParams::from_grads(grads, &mha));
        assert_eq!(found.len(), 4 * 2);
        for (path, _, grad) in found {
            assert!(grad.iter().all(|value| value.is_finite()), "{path}");
            // The softmax does not see what all scores of a query share: but for rounding it is zero.
            let is_free = path == "key.bias";
            assert!(is_free || grad.iter().any(|value| *value != 0.0), "{path}");
        }
    });
}
