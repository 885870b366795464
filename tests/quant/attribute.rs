//! The attribute that writes `forward_q` for the calls of an impl block.

// What a receiver that is borrowed by hand says to the attribute, and to nobody else.
#![allow(clippy::needless_borrow)]

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{QatConfig, QuantizedForward, module::map_quantizers, quantizers};

use crate::support::{tensor, values, with_numbers};

mod written {
    //! A model as people write it, with the attribute.

    use burn::module::Module;
    use burn::nn::attention::{MultiHeadAttention, MultiHeadAttentionConfig};
    use burn::nn::conv::{Conv1d, Conv1dConfig};
    use burn::nn::gru::{BiGru, BiGruConfig};
    use burn::nn::transformer::{
        TransformerDecoder, TransformerDecoderConfig, TransformerEncoderConfig,
        TransformerEncoderLayer,
    };
    use burn::nn::{
        BatchNorm, BatchNormConfig, BiLstm, BiLstmConfig, BiRnn, BiRnnConfig, Gelu, Linear,
        LinearConfig, Lstm, LstmConfig, Rnn, RnnConfig,
    };
    use burn::tensor::{Device, Tensor};
    use burn_lean::quant::{
        qat::{MhaInput, TransformerDecoderInput},
        quantize_calls,
    };

    /// What has another `forward` than a tensor to a tensor.
    #[derive(Module, Debug)]
    pub(super) struct Sequences {
        rnn: Rnn,
        both: BiRnn,
        lstm: BiLstm,
        gru: BiGru,
        decoder: TransformerDecoder,
    }

    #[quantize_calls]
    impl Sequences {
        pub(super) fn new(device: &Device) -> Self {
            Self {
                rnn: RnnConfig::new(4, 4, true).init(device),
                both: BiRnnConfig::new(4, 2, true).init(device),
                lstm: BiLstmConfig::new(4, 2, true).init(device),
                gru: BiGruConfig::new(4, 2, true).init(device),
                decoder: TransformerDecoderConfig::new(4, 8, 2, 1)
                    .with_dropout(0.0)
                    .init(device),
            }
        }

        pub(super) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
            let memory = x.clone();
            let (x, _) = self.rnn.forward(x, None);
            let (x, _) = self.both.forward(x, None);
            let (x, _) = self.lstm.forward(x, None);
            let (x, _) = self.gru.forward(x, None);
            self.decoder
                .forward(TransformerDecoderInput::new(x, memory))
        }
    }

    /// Layers behind more references than one.
    #[derive(Module, Debug)]
    pub(super) struct Referred {
        pub(super) first: Linear,
        second: Linear,
        third: Linear,
        lstm: Lstm,
        encoder: TransformerEncoderLayer,
        block: Block,
    }

    impl Referred {
        pub(super) fn new(device: &Device) -> Self {
            let linear = || LinearConfig::new(4, 4).init(device);
            let encoder = TransformerEncoderConfig::new(4, 8, 2, 1).with_dropout(0.0);
            let encoder = encoder.init(device);
            Self {
                first: linear(),
                second: linear(),
                third: linear(),
                lstm: LstmConfig::new(4, 4, true).init(device),
                encoder: encoder.layers.into_iter().next().unwrap(),
                block: Block {
                    linear: linear(),
                    activation: Gelu::new(),
                },
            }
        }
    }

    #[quantize_calls]
    impl Referred {
        pub(super) fn forward(&self, mut x: Tensor<3>) -> Tensor<3> {
            for layer in [&self.first, &self.second].iter() {
                x = layer.forward(x);
            }
            let (third, block, encoder, lstm) =
                (&&&self.third, &&self.block, &&self.encoder, &&self.lstm);
            let x = block.forward(third.forward(x));
            lstm.forward(encoder.forward(x, None, None), None).0
        }
    }

    #[derive(Module, Debug)]
    pub(super) struct Block {
        linear: Linear,
        activation: Gelu,
    }

    #[quantize_calls(crate = burn_lean::quant)]
    impl Block {
        fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
            self.activation.forward(self.linear.forward(x))
        }
    }

    #[derive(Module, Debug)]
    pub(super) struct Net {
        conv: Conv1d,
        norm: BatchNorm,
        blocks: Vec<Block>,
        layers: Vec<Linear>,
        head: Option<Linear>,
        mha: MultiHeadAttention,
        lstm: Lstm,
    }

    impl Net {
        pub(super) fn new(device: &Device) -> Self {
            let linear = || LinearConfig::new(4, 4).init(device);
            let block = || Block {
                linear: linear(),
                activation: Gelu::new(),
            };
            Self {
                conv: Conv1dConfig::new(2, 3, 2).init(device),
                norm: BatchNormConfig::new(3).init(device),
                blocks: vec![block(), block()],
                layers: vec![linear(), linear()],
                head: Some(linear()),
                mha: MultiHeadAttentionConfig::new(4, 2)
                    .with_dropout(0.0)
                    .init(device),
                lstm: LstmConfig::new(4, 4, true).init(device),
            }
        }

        fn first(&self) -> &Linear {
            &self.layers[0]
        }
    }

    #[quantize_calls]
    impl Net {
        pub(super) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
            let x = self.norm.forward(self.conv.forward(x));
            let mut x = self.blocks.iter().fold(x, |x, block| block.forward(x));
            for layer in &self.layers[1..] {
                x = layer.forward(x);
            }
            let x = self.first().forward(x);
            let x = self.mha.forward(MhaInput::self_attn(x)).context;
            let (x, _) = self.lstm.forward(x, None);
            match &self.head {
                Some(head) => head.forward(x),
                None => x,
            }
        }
    }
}

/// The same bits with all quantizers switched off, and each one reached by one forward pass. Returns
/// how many there are.
fn assert_reached<M: Module>(
    net: M,
    x: Tensor<3>,
    forward: impl Fn(&M, Tensor<3>) -> Tensor<3>,
) -> usize {
    let net = with_numbers(net, 1);
    let plain = values(forward(&net.valid(), x.clone().inner()));
    let prepared = QatConfig::new().prepare(net).unwrap();
    let off = map_quantizers(prepared.clone(), |at| at.quantizer.with_enabled(false));
    assert_eq!(values(forward(&off.valid(), x.clone().inner())), plain);
    forward(&prepared, x);
    let located = quantizers(&prepared);
    for located in &located {
        assert!(located.quantizer.is_observed(), "{}", located.path);
    }
    located.len()
}

#[test]
fn the_attribute_reaches_every_layer_that_is_called() {
    let device = Device::flex().autodiff();
    let x = tensor::<3>(1, [2, 2, 5], &device);
    let count = assert_reached(written::Net::new(&device), x, written::Net::forward);
    assert_eq!(count, 2 * (1 + 2 + 2 + 1 + 4 + 8) + 4);
}

#[test]
fn the_attribute_reaches_recurrent_layers_and_decoders() {
    let device = Device::flex().autodiff();
    let x = tensor::<3>(1, [2, 3, 4], &device);
    let net = written::Sequences::new(&device);
    assert_reached(net, x, written::Sequences::forward);
}

#[test]
fn the_attribute_sees_layers_behind_several_references() {
    let device = Device::flex().autodiff();
    let x = tensor::<3>(1, [2, 3, 4], &device);
    let net = written::Referred::new(&device);
    assert_reached(net, x, written::Referred::forward);
}

mod forms {
    //! Calls in every form that the attribute reaches.

    use burn::module::Module;
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{Device, Tensor};
    use burn_lean::quant::quantize_calls;

    #[derive(Module, Debug)]
    pub(super) struct Forms {
        turbofish: Linear,
        by_path: Linear,
        in_vec: Linear,
        repeated: Linear,
        free: Linear,
        default_method: Linear,
    }

    /// Has state that a call changes.
    struct Counter(usize);

    impl Counter {
        fn forward(&mut self, x: Tensor<2>) -> Tensor<2> {
            self.0 += 1;
            x
        }
    }

    #[quantize_calls(crate = burn_lean::quant)]
    impl Forms {
        pub(super) fn new(device: &Device) -> Self {
            let layer = || LinearConfig::new(4, 4).init(device);
            Self {
                turbofish: layer(),
                by_path: layer(),
                in_vec: layer(),
                repeated: layer(),
                free: layer(),
                default_method: layer(),
            }
        }

        pub(super) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
            let mut counter = Counter(0);
            let x = (&mut counter).forward(x);
            assert_eq!(counter.0, 1);
            let x = self.turbofish.forward::<2>(x);
            let x = Linear::forward(&self.by_path, x);
            let mut all = vec![self.in_vec.forward(x.clone()), x.clone()];
            all.extend(vec![self.repeated.forward(x); 2]);
            let x = Tensor::cat(all, 0);
            let x = free(&self.free, x);
            self.applied(x)
        }
    }

    #[quantize_calls(crate = burn_lean::quant)]
    fn free(layer: &Linear, x: Tensor<2>) -> Tensor<2> {
        layer.forward(x)
    }

    #[quantize_calls(crate = burn_lean::quant)]
    trait Applied {
        fn layer(&self) -> &Linear;

        fn applied(&self, x: Tensor<2>) -> Tensor<2> {
            self.layer().forward(x)
        }
    }

    impl Applied for Forms {
        fn layer(&self) -> &Linear {
            &self.default_method
        }
    }
}

#[test]
fn calls_with_generic_arguments_by_path_in_macros_functions_and_traits_are_reached() {
    let device = Device::flex();
    let model = with_numbers(forms::Forms::new(&device), 3);
    let x = tensor::<2>(1, [2, 4], &device);
    let expected = values(model.forward(x.clone()));
    let run = |model: &forms::Forms, device: &Device| model.forward(Tensor::ones([1, 4], device));
    let prepared = QatConfig::new().prepare_with(model, run).unwrap();
    // Nothing is observed yet, so that inputs pass; weights are quantized.
    let found = values(prepared.forward(x));
    assert_ne!(found, expected);
    let uncalled = quantizers(&prepared)
        .into_iter()
        .filter(|located| !located.quantizer.was_called())
        .map(|located| located.path);
    assert_eq!(uncalled.collect::<Vec<_>>(), Vec::<String>::new());
}

#[test]
fn a_model_with_the_attribute_is_recorded_with_a_batch_that_has_no_tape() {
    let plain = Device::flex();
    let model = written::Referred::new(&plain.clone().autodiff());
    let model = QatConfig::new().prepare(with_numbers(model, 3)).unwrap();
    let loss = |model: &written::Referred, x: Tensor<3>| model.forward(x).square().mean();
    let x = tensor::<3>(5, [2, 3, 4], &plain);
    let loss = QuantizedForward::new().run(&model, x, loss).unwrap();
    let all = quantizers(&model);
    assert!(all.len() > 20, "{}", all.len());
    assert!(all.iter().all(|located| located.quantizer.is_observed()));
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    assert!(grads.get::<2>(model.first.weight.id).is_some());
}
