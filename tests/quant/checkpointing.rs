//! Models on a device that recomputes activations in the backward pass (gradient checkpointing).

use burn::module::Module;
use burn::module::Param;
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Bool, Device, GradientCheckpointingStrategy, Int, Tensor};
use burn_lean::quant::{
    FakeQuantizeConfig, ForwardQ, GptqConfig, Learned, NumberFormat, QatConfig, Rounding,
    RoundingConfig, Scheme, WeightConfig, advance, calibrate, fold, fold::FoldPair,
    module::LayerInputs, quantizers,
};

use crate::support::{each_device, gradients, tensor, values, with_numbers};

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    norm: BatchNorm,
    second: Linear,
    /// Neither is trained, but both meet tensors that are.
    order: Param<Tensor<1, Int>>,
    hidden: Param<Tensor<2, Bool>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let order = Tensor::from_data([2, 0, 1], device);
        let net = Self {
            first: LinearConfig::new(6, 4).init(device),
            norm: BatchNormConfig::new(4).init(device),
            second: LinearConfig::new(4, 3).init(device),
            hidden: Param::initialized(
                burn::module::ParamId::new(),
                Tensor::from_data([[true, false, false]], device),
            ),
            order: Param::initialized(burn::module::ParamId::new(), order),
        };
        with_numbers(net, 4)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.norm.forward(self.first.forward_q(x));
        let x = self.second.forward_q(x);
        let x = x.select(1, self.order.val());
        let hidden = self.hidden.val().expand(x.shape());
        x.mask_fill(hidden, 0.5)
    }
}

fn checkpointing(device: &Device) -> Device {
    device.clone().autodiff().gradient_checkpointing()
}

/// Gradients of a loss, by path.
fn backward(net: &Net, x: Tensor<2>) -> Vec<(String, Vec<f32>)> {
    let loss = net.forward(x).square().mean();
    let grads = GradientsParams::from_grads(loss.backward(), net);
    let found = gradients(net, grads).into_iter();
    found.map(|(path, _, values)| (path, values)).collect()
}

#[test]
fn learned_scales_train_and_calibrate() {
    each_device(|target| {
        let activation = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
        let config = QatConfig::new()
            .with_weight(WeightConfig::int(4).with_learned(Learned::Lsq))
            .with_activation(Some(activation.with_learned(Learned::LsqPlus)));
        let trained = |device: &Device| {
            let mut net = config.prepare(Net::new(device)).unwrap();
            let mut optimizer = SgdConfig::new().init();
            for step in 0..4 {
                let x = tensor(step, [8, 6], device);
                if step == 2 {
                    net = calibrate(net, |net| {
                        net.forward(x.clone());
                    })
                    .unwrap();
                }
                let loss = net.forward(x).square().mean();
                let grads = GradientsParams::from_grads(loss.backward(), &net);
                net = advance(optimizer.step(0.1, net, grads));
            }
            let scales = quantizers(&net).into_iter().map(|located| {
                assert!(located.quantizer.is_learning());
                values(located.quantizer.qparams().unwrap().scale)
            });
            scales.collect::<Vec<_>>()
        };
        // It changes what is kept, not what is computed.
        assert_eq!(
            trained(&checkpointing(&target.device)),
            trained(&target.device.clone().autodiff())
        );
    });
}

#[test]
fn folded_and_rounded_models_train_on() {
    each_device(|target| {
        let changed = |device: &Device| {
            let x = tensor::<2>(1, [8, 6], device);
            let folded = fold(Net::new(device), &[FoldPair::new("first", "norm", 1e-5)]).unwrap();
            let of_folded = backward(&folded, x.clone());
            let config = QatConfig::new().with_weight(WeightConfig::int(4));
            let prepared = config.prepare(folded).unwrap();
            let prepared = calibrate(prepared, |net| {
                net.forward(x.clone());
            })
            .unwrap();
            let evaluated = prepared.valid();
            let inputs = LayerInputs::collect(&evaluated, |evaluated| {
                evaluated.forward(x.clone().inner());
            });
            let rounding = RoundingConfig::new().with_rounding(Rounding::Gptq(GptqConfig::new()));
            let (rounded, _) = rounding.apply(prepared, &inputs.unwrap()).unwrap();
            [of_folded, backward(&rounded, x)]
        };
        let device = checkpointing(&target.device);
        let found = changed(&device);
        for gradients in &found {
            assert!(gradients.iter().any(|(path, _)| path == "first.weight"));
        }
        assert_eq!(found, changed(&target.device.clone().autodiff()));
    });
}

#[test]
fn what_a_fold_gives_back_is_where_it_was() {
    let device = checkpointing(&Device::flex());
    #[derive(Module, Debug)]
    struct Pair {
        teacher: Net,
        student: Net,
        words: Embedding,
    }
    let pair = Pair {
        teacher: Net::new(&device).valid(),
        student: Net::new(&device),
        words: EmbeddingConfig::new(3, 2).init(&device).no_grad(),
    };
    let pair = fold(
        pair,
        &[FoldPair::new("student.first", "student.norm", 1e-5)],
    )
    .unwrap();
    let strategy = Some(GradientCheckpointingStrategy::Balanced);
    let student = &pair.student;
    let strategies = [
        student.first.weight.val().gradient_checkpointing_strategy(),
        student
            .norm
            .running_mean
            .value()
            .gradient_checkpointing_strategy(),
        student.order.val().gradient_checkpointing_strategy(),
        student.hidden.val().gradient_checkpointing_strategy(),
    ];
    assert_eq!(strategies, [strategy; 4]);
    assert!(!pair.words.weight.is_require_grad());
    // A teacher is not trained because its student is folded, until the whole model is.
    assert!(!pair.teacher.first.weight.val().is_autodiff());
    assert!(!pair.teacher.norm.training.is_enabled());
    assert!(pair.train().teacher.norm.training.is_enabled());
}
