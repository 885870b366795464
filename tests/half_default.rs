//! `amp`, `quant`, `prune` and `oneshot` on a device whose default float is F16: master weights, statistics,
//! scales and the regression are F32 all the same. A process configures a device once, so this one has a test binary of its own.

#![cfg(feature = "ndarray")]

#[macro_use]
mod support;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_lean::amp::{
    AmpError, AutocastConfig, Checkpoints, GradScalerConfig, ResumableOptimizer, self_test,
};
use burn_lean::oneshot::{OneShot, Preset, load_compressed};
use burn_lean::prune::{
    Budget, ChitaConfig, DeadColumns, Effort, FisherConfig, GradientMatrix, Layout, Method,
    Problem, PruneError, Pruner, Ridge, RidgeChoice, Selection, SolverConfig, recompute_batch_norm,
    solve, solve_with_ridge,
};
use burn_lean::quant::{
    ConvertConfig, FakeQuantizeConfig, GptqConfig, Learned, MixedPrecisionConfig, NumberFormat,
    ObserverConfig, PtqConfig, QatConfig, QuantParams, QuantizedTensor, RangeMethod, Rounding,
    RoundingConfig, Scheme, Unsupported, WeightConfig, WeightRange, advance, quantizers,
};

use support::{Perceptron, cast, tensor, values};

fn net(device: &Device) -> Perceptron {
    Perceptron::new([32, 16, 4], 3, device)
}

/// One test, so that nothing else can be first to use the device.
#[test]
fn statistics_and_scales_are_f32_where_the_default_is_f16() {
    let mut device = Device::flex();
    device.configure(FloatDType::F16).unwrap();
    assert_eq!(net(&device).first.weight.val().dtype(), DType::F16);

    let tracked = device.clone().autodiff();
    autocasts(&tracked);
    goes_on_from_a_checkpoint(&tracked);
    #[cfg(feature = "train")]
    fails_in_one_pass(&tracked);
    #[cfg(feature = "train")]
    draws_on_after_a_comparison(&tracked);
    calibrates(&device);
    trains(&tracked);
    keeps_scales_of_every_format(&device);
    allocates(&device);
    prunes(&device);
    prunes_layer_by_layer(&device);
    measures_statistics(&device);
    saves_what_was_compressed(&device);
}

/// Values that half precision does not have come back from a file as they are.
fn saves_what_was_compressed(device: &Device) {
    struct InF32;
    impl ModuleMapper for InF32 {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| value.cast(FloatDType::F32) * 1.001)
        }
    }
    let model = net(device).map(&mut InF32);
    let x = tensor::<2>(5, [64, 32], device).cast(FloatDType::F32);
    let forward = |model: &Perceptron, x: Tensor<2>| model.forward(x);
    let preset = Preset::w4a16().with_group(8);
    let done = OneShot::new(preset).compress(model.clone(), [x], forward);
    let done = done.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    done.save(&path).unwrap();
    let loaded = load_compressed(model, &path).unwrap().model;
    for (found, expected) in [
        (&loaded.first.weight, &done.model.first.weight),
        (&loaded.second.weight, &done.model.second.weight),
    ] {
        assert_eq!(found.val().dtype(), DType::F32);
        assert_eq!(values(found.val()), values(expected.val()));
    }
}

/// F32 master weights on it train as on any other device.
fn autocasts(device: &Device) {
    let refused = AutocastConfig::new(FloatDType::F16).prepare(net(device));
    assert_matches!(
        refused.unwrap_err().error(),
        AmpError::ParameterDtype { .. }
    );
    for dtype in [FloatDType::F16, FloatDType::BF16] {
        assert!(self_test(device, dtype).unwrap().failure().is_none());
        let model = masters(device);
        let (mut model, autocast) = AutocastConfig::new(dtype).prepare(model).unwrap();
        let mut scaler = GradScalerConfig::for_dtype(dtype)
            .with_max_norm(Some(1.0))
            .init()
            .unwrap();
        let mut optimizer = SgdConfig::new().init();
        let mut losses = Vec::new();
        for step in 0..4 {
            let x = tensor::<2>(9, [8, 32], device);
            let loss = autocast.forward(x, |x| model.forward(x)).square().mean();
            assert_eq!(loss.dtype(), DType::F32);
            losses.push(loss.clone().into_scalar::<f32>());
            let factor = if step == 2 { f32::INFINITY } else { 1.0 };
            let grads = scaler.scale(loss * factor).unwrap().backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = scaler.step(&mut optimizer, 0.1, model, grads).unwrap();
            if dtype == FloatDType::BF16 && step == 1 {
                // Without a loss scale nothing is checked.
                break;
            }
        }
        assert!(losses[1] < losses[0], "{losses:?}");
        if dtype == FloatDType::F16 {
            assert_eq!(scaler.state().skipped_steps, 1);
            // The skipped step changed nothing.
            assert_eq!(losses[2], losses[3], "{losses:?}");
        }
        assert_eq!(model.first.weight.base().dtype(), DType::F32);
    }
}

/// The regression over an F16 model is the one over the same numbers given in F32.
fn prunes(device: &Device) {
    let net = net(device);
    let selection = Selection::of(&net, None).unwrap();
    let loss = |net: &Perceptron, x: &Tensor<2>| net.forward_q(x.clone()).square().mean();
    let batch = tensor::<2>(5, [24, 32], device);
    let fisher = FisherConfig::new(24)
        .collect(&net, &selection, loss, [batch])
        .unwrap();
    let dense = selection.flatten(&net).unwrap();
    assert_eq!(dense.dtype(), DType::F32);
    let gradients = fisher.gradients;
    let rows: Vec<f32> = (0..24)
        .flat_map(|row| gradients.row(row).unwrap())
        .collect();
    let rows = TensorData::new(rows, [24, dense.dims()[0]]);
    // A device whose default is F32.
    #[allow(deprecated)] // ndarray is supported as long as Burn has it.
    let other = Device::ndarray();
    let rows = Tensor::from_data(rows, (&other, DType::F32));
    let layout = selection.layout().clone();
    let found = Problem::new(gradients, dense.clone(), layout.clone()).unwrap();
    let dense = Tensor::from_data(dense.into_data(), (&other, DType::F32));
    let expected = Problem::new(GradientMatrix::from_tensor(rows).unwrap(), dense, layout).unwrap();
    for method in [
        Method::DiagonalFisher,
        Method::WoodFisher { block_size: 64 },
        Method::BackSolve,
        Method::Chita(ChitaConfig::new()),
    ] {
        let config = SolverConfig::new(Budget::Sparsity(0.5))
            .with_dead_columns(Some(DeadColumns::Priced))
            .with_method(method);
        let [found, expected] = [&found, &expected].map(|problem| {
            let problem = problem.clone().with_ridge(1e-3).unwrap();
            solve(&problem, &config).unwrap()
        });
        assert_eq!(found.weights.dtype(), DType::F32);
        assert_eq!(found.support, expected.support);
        // A number of F16 is off by up to 2⁻¹¹ of it.
        assert_near!(values(found.weights).iter(), values(expected.weights), 1e-5);
    }
    // More samples than weights.
    let many = GradientMatrix::from_tensor(tensor::<2>(6, [40, 10], device).cast(DType::F32));
    let dense = Tensor::<1>::ones([10], (device, DType::F32));
    let many = Problem::new(many.unwrap(), dense, Layout::anonymous(10)).unwrap();
    let solved = solve(&many, &SolverConfig::new(Budget::Keep(4))).unwrap();
    assert!(solved.relative_gap < 1e-6, "{}", solved.relative_gap);
    let choice = RidgeChoice::Sweep(vec![Ridge {
        value: 1e-3,
        first_order: None,
        tempering: Some(1.0),
    }]);
    let config = SolverConfig::new(Budget::Sparsity(0.5));
    let sweep = solve_with_ridge(&found, &config, &choice, &mut |_| Ok(1.0)).unwrap();
    let net = selection.unflatten(net, sweep.solution.weights).unwrap();
    assert_eq!(net.first.weight.val().dtype(), DType::F16);
}

fn prunes_layer_by_layer(device: &Device) {
    let batches = [5, 6].map(|seed| tensor::<2>(seed, [24, 32], device));
    let mut pruner = Pruner::new(Budget::Sparsity(0.5)).with_effort(Effort::Quick);
    pruner.tuning = Some(0);
    let pruned = pruner.prune(net(device), |net, x| net.forward_q(x), batches);
    let pruned = pruned.unwrap();
    assert_eq!(pruned.masks.nonzeros(), 288);
    for weight in [&pruned.model.first.weight, &pruned.model.second.weight] {
        assert_eq!(weight.val().dtype(), DType::F16);
        assert!(values(weight.val()).iter().all(|weight| weight.is_finite()));
    }
}

/// Means that F16 does not have, and variances beyond it.
fn measures_statistics(device: &Device) {
    let norm = |dtype| cast(BatchNormConfig::new(2).init(device), dtype);
    let forward = |norm: &BatchNorm, x: &Tensor<2>| norm.forward(x.clone());
    let x = tensor::<2>(5, [64, 2], &device.clone().autodiff());
    let x = x.cast(FloatDType::F32) * 1000.0;
    let renewed = recompute_batch_norm(norm(FloatDType::F32), forward, [x.clone()]).unwrap();
    for (found, expected) in [
        (renewed.running_mean, x.clone().mean_dim(0)),
        (renewed.running_var, x.clone().var_bias(0)),
    ] {
        assert_eq!(found.value_sync().dtype(), DType::F32);
        let (found, expected) = (values(found.value_sync()), values(expected));
        let ratios = found.iter().zip(&expected).map(|(a, b)| a / b);
        assert_near!(ratios, [1.0f32; 2], 1e-4);
    }
    let half = recompute_batch_norm(norm(FloatDType::F16), forward, [x.cast(FloatDType::F16)]);
    let (half, error) = half.unwrap_err().into_parts();
    assert_matches!(error, PruneError::NonFiniteStatistics { .. });
    assert_eq!(values(half.running_var.value_sync()), [1.0; 2]);
}

fn calibrates(device: &Device) {
    let data: Vec<Tensor<2>> = (0..3).map(|seed| tensor(seed, [64, 32], device)).collect();
    let config = PtqConfig::new()
        .with_observers(vec![
            ObserverConfig::MinMax,
            ObserverConfig::histogram(RangeMethod::Search),
            ObserverConfig::histogram(RangeMethod::Percentile { percent: 100.0 }),
        ])
        .with_weight_range(WeightRange::LeastSquares)
        .with_rounding(RoundingConfig::new().with_rounding(Rounding::Gptq(GptqConfig::new())))
        .with_progress(false);
    let quantized = config.quantize(
        net(device),
        || data.clone(),
        |net, x| {
            net.forward_q(x);
        },
    );
    let (net, report) = quantized.unwrap();
    assert!(
        report.activations.iter().all(|range| range.sqnr > 30.0),
        "{report}"
    );
    for located in quantizers(&net) {
        let qparams = located.quantizer.qparams().unwrap();
        assert_eq!(qparams.scale.dtype(), DType::F32);
        assert_eq!(qparams.zero_point.dtype(), DType::F32);
        // A scale in F16 would have eleven bits.
        let f16_bits = |scale: &f32| scale.to_bits().trailing_zeros() >= 13;
        assert!(
            !values(qparams.scale).iter().all(f16_bits),
            "{}",
            located.path
        );
    }
    let keep = ConvertConfig::new().with_unsupported(Unsupported::KeepFakeQuantized);
    let expected = values(net.forward_q(data[0].clone()));
    let (converted, _) = keep.convert(net).unwrap();
    assert_eq!(values(converted.forward_q(data[0].clone())), expected);
}

fn trains(device: &Device) {
    let activation = FakeQuantizeConfig::new(Scheme::affine(NumberFormat::uint8()));
    let config = QatConfig::new()
        .with_weight(WeightConfig::int(4).with_learned(Learned::Lsq))
        .with_activation(Some(activation.with_learned(Learned::LsqPlus)));
    let mut net = config.prepare(net(device)).unwrap();
    let mut optimizer = SgdConfig::new().init();
    for seed in 0..3 {
        let loss = net
            .forward_q(tensor(seed, [16, 32], device))
            .square()
            .mean();
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        net = advance(optimizer.step(0.01, net, grads));
    }
    for located in quantizers(&net) {
        let scale = located.quantizer.qparams().unwrap().scale;
        assert_eq!(scale.dtype(), DType::F32);
        assert!(values(scale).iter().all(|scale| scale.is_finite()));
    }
}

fn keeps_scales_of_every_format(device: &Device) {
    // No number of these is one of F16.
    let x = tensor::<2>(7, [4, 32], device).cast(DType::F32) * 0.3 + 1e-6;
    let schemes = [
        Scheme::symmetric(NumberFormat::int8().narrow()),
        Scheme::affine(NumberFormat::uint8()),
        Scheme::mxfp4(burn_lean::quant::format::ScaleRounding::Up),
        Scheme::nvfp4(burn_lean::quant::format::ScaleRounding::Up),
        Scheme::nvfp4(burn_lean::quant::format::ScaleRounding::Standard),
    ];
    for scheme in schemes {
        let qparams = QuantParams::of(&x, &scheme).unwrap();
        assert_eq!(qparams.scale.dtype(), DType::F32, "{scheme}");
        let fake = burn_lean::quant::fake_quantize(x.clone(), &qparams, &scheme);
        let quantized = QuantizedTensor::quantize(&x, &qparams, &scheme).unwrap();
        let dequantized = quantized.dequantize::<2>(device).unwrap();
        assert_eq!(dequantized.dtype(), DType::F32, "{scheme}");
        assert_eq!(values(dequantized), values(fake), "{scheme}");
    }
}

fn allocates(device: &Device) {
    let x = tensor::<2>(1, [64, 32], device);
    let allocation = MixedPrecisionConfig::new(QatConfig::new()).allocate(
        net(device),
        |net| {
            net.forward_q(x.clone());
        },
        |net| net.forward_q(x.clone()),
        |_| 1.0,
    );
    assert!(allocation.unwrap().report.within_bound);
}

/// A network of F32 master weights.
fn masters(device: &Device) -> Perceptron {
    struct InF32;
    impl ModuleMapper for InF32 {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| value.cast(FloatDType::F32).detach().require_grad())
        }
    }
    net(device).map(&mut InF32)
}

/// With moments in F32: Burn loads them in F16.
fn goes_on_from_a_checkpoint(device: &Device) {
    let step = |model: Perceptron, optim: &mut ModuleOptimizer, seed: u64| {
        let x = tensor::<2>(seed, [8, 32], device).cast(FloatDType::F32);
        let loss = model.forward(x).square().mean();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        optim.step(0.01, model, grads)
    };
    let adam_w = || AdamWConfig::new().build();
    let fresh = || ResumableOptimizer::new(adam_w(), device).init();
    let (mut model, mut optim) = (masters(device), fresh());
    for seed in 0..2 {
        model = step(model, &mut optim, seed);
    }
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let scaler = GradScalerConfig::for_dtype(FloatDType::F32).init().unwrap();
    checkpoints.save(2, &model, &optim, &scaler).unwrap();

    let loaded = checkpoints.load(2, masters(device), fresh());
    let (loaded, mut resumed, _) = loaded.unwrap();
    let expected = step(model, &mut optim, 2).weights();
    assert_eq!(step(loaded, &mut resumed, 2).weights(), expected);
    // A plain optimizer loads its state on Burn's default device, which may be another one.
    if Device::default() == *device {
        let plain = checkpoints.load(2, masters(device), adam_w().into());
        assert_matches!(
            plain.err().unwrap().error(),
            AmpError::OptimizerDtype {
                recorded: DType::F32,
                loaded: DType::F16,
                ..
            }
        );
    }
}

/// What is told of the pass that fails is added to what the other one tells, in F32.
#[cfg(feature = "train")]
fn fails_in_one_pass(device: &Device) {
    use burn::optim::GradientsAccumulator;
    use burn::train::TrainStep;
    use burn_lean::amp::{Amp, AmpTrainStep, Autocast};

    #[derive(Module, Debug)]
    struct Net {
        inner: Perceptron,
    }

    impl AmpTrainStep for Net {
        type Input = (Tensor<2>, FloatDType);
        type Output = ();

        fn train_step(&self, autocast: &Autocast, (x, dtype): Self::Input) -> (Tensor<1>, ()) {
            let y = autocast.forward(x, |x| self.inner.forward(x));
            (y.mean().cast(dtype), ())
        }
    }

    let model = Net {
        inner: masters(device),
    };
    let before = model.inner.weights();
    let config = AutocastConfig::new(FloatDType::F16);
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16);
    let amp = Amp::new(model, &config, &scaler).unwrap();
    let mut sum = GradientsAccumulator::new();
    for of_loss in [FloatDType::F16, FloatDType::F32] {
        let x = tensor::<2>(9, [8, 32], device).cast(FloatDType::F32);
        let grads = TrainStep::step(&amp, (x, of_loss)).grads;
        sum.accumulate(&amp, grads);
    }
    let mut optim = SgdConfig::new().init();
    let amp = TrainStep::optimize(amp, &mut optim, 0.1_f64.into(), sum.grads());
    assert_matches!(
        amp.monitor().error(),
        Some(AmpError::LossDtype { dtype: DType::F16 })
    );
    assert_eq!(amp.state().unwrap().skipped_steps, 1);
    assert_eq!(amp.model().inner.weights(), before);
}

/// The generator is set to one of its own numbers for each comparison of two steps, not to the same one again.
#[cfg(feature = "train")]
fn draws_on_after_a_comparison(device: &Device) {
    use burn::nn::{Dropout, DropoutConfig};
    use burn::tensor::Distribution;
    use burn::train::{InferenceStep, RegressionOutput, TrainOutput, TrainStep};
    use burn_lean::amp::{Amp, OwnSteps};

    #[derive(Module, Debug)]
    struct Net {
        inner: Perceptron,
        dropout: Dropout,
    }

    impl InferenceStep for Net {
        type Input = Tensor<2>;
        type Output = RegressionOutput;

        fn step(&self, x: Tensor<2>) -> RegressionOutput {
            let y = self.dropout.forward(self.inner.forward(x));
            RegressionOutput::new(y.clone().square().mean(), y.clone(), y)
        }
    }

    impl TrainStep for Net {
        type Input = Tensor<2>;
        type Output = RegressionOutput;

        fn step(&self, x: Tensor<2>) -> TrainOutput<RegressionOutput> {
            let item = InferenceStep::step(self, x);
            TrainOutput::new(self, item.loss.backward(), item)
        }
    }

    device.seed(3);
    let drawn = [0, 1].map(|_| {
        let model = OwnSteps::new(Net {
            inner: masters(device),
            dropout: DropoutConfig::new(0.5).init(),
        });
        let config = AutocastConfig::new(FloatDType::F16);
        let scaler = GradScalerConfig::for_dtype(FloatDType::F16);
        let amp = Amp::new(model, &config, &scaler).unwrap();
        let x = tensor::<2>(9, [8, 32], device).cast(FloatDType::F32);
        let _ = TrainStep::step(&amp, x);
        assert_eq!(amp.monitor().error(), None);
        values(Tensor::<1>::random([8], Distribution::Default, device))
    });
    assert_ne!(drawn[0], drawn[1]);
}
