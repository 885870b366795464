//! What a look at a model, a step and many steps cost in memory, in a process of their own.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::Module;
use burn::nn::conv::Conv2dConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Distribution, FloatDType, Tensor};
use burn_lean::amp::{
    Autocast, AutocastConfig, Checkpoints, DynamicLossScale, GradScaler, GradScalerConfig,
    LossScale,
};
use burn_lean::deploy::{EngineConfig, Export};
use burn_lean::oneshot::{Compressed, OneShot, OneShotError, Preset, Report};
use burn_lean::prune::{
    Budget, FisherConfig, GradientMatrix, PrunerConfig, RidgeChoice, SolverConfig,
};
use burn_lean::quant::deploy::{PretrainedFolder, load_pretrained};
use burn_lean::quant::{
    ConvertConfig, ForwardQ, QatConfig, WeightConfig, WeightGranularity, module::LayerInputs,
};
use burn_lean::{amp, quant};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// The process is one test's at a time.
fn alone() -> MutexGuard<'static, ()> {
    static PROCESS: Mutex<()> = Mutex::new(());
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The most bytes that were allocated at once during `work`, above what was before it.
fn most_during(work: impl FnOnce()) -> usize {
    HEAP.reset_peak_usage();
    let before = HEAP.current_usage();
    work();
    HEAP.peak_usage().saturating_sub(before)
}

/// 64 MiB of weights; the activations of one example are some KiB.
#[test]
fn audits_copy_no_weights() {
    let _alone = alone();
    const WIDTH: usize = 2048;
    const BYTES: usize = 4 * 4 * WIDTH * WIDTH;
    let device = Device::flex().autodiff();
    let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(&device);
    let model: Vec<Linear> = (0..4).map(layer).collect();
    let forward = |model: &Vec<Linear>, x: Tensor<2>| {
        let mut layers = model.iter();
        layers.by_ref().fold(x, |x, layer| layer.forward(x))
    };
    let x = Tensor::<2>::ones([1, WIDTH], &device);
    // Weights are there, and what the first call needs.
    let small = vec![LinearConfig::new(4, 4).init(&device)];
    for (model, x, is_counted) in [
        (small, Tensor::<2>::ones([1, 4], &device), false),
        (model, x, true),
    ] {
        let config = amp::AutocastConfig::new(FloatDType::F16);
        let (model, autocast) = config.prepare(model).unwrap();
        let _ = forward(&model, x.clone());
        let grown = most_during(|| {
            let found = amp::audit(&model, &autocast, x.clone(), |model, autocast, x| {
                autocast.forward(x, |x| forward(model, x))
            });
            found.unwrap().check().unwrap();
            let layers = quant::audit(&model, x, forward).unwrap().layers;
            assert_eq!(layers.len(), model.len());
        });
        assert!(!is_counted || grown < BYTES / 4, "{grown} of {BYTES}");
    }
}

/// Bytes that are allocated when the loss is there, but not before.
///
/// The median of five: a thread of a pool has a buffer of its own, as large as a cache, from its first
/// product on, and which of them take part is chance.
fn held(loss: impl Fn() -> Tensor<1>) -> f64 {
    // What is made once is made.
    drop(loss().backward());
    let mut held = [0; 5].map(|_| {
        let before = HEAP.current_usage() as f64;
        let loss = loss();
        let held = HEAP.current_usage() as f64 - before;
        drop(loss.backward());
        held
    });
    held.sort_by(f64::total_cmp);
    held[2]
}

#[test]
fn a_transformer_holds_no_more_unedited_than_in_a_region() {
    const GOAL: f64 = 1.05;
    let _alone = alone();
    let device = Device::flex().autodiff();
    let forward = |model: &TransformerEncoder, x: Tensor<3>| {
        let x = model.forward(TransformerEncoderInput::new(x));
        x.square().mean()
    };
    for (norm_first, dropout) in [(false, 0.0), (true, 0.0), (false, 0.1)] {
        let model = TransformerEncoderConfig::new(64, 256, 4, 2)
            .with_norm_first(norm_first)
            .with_dropout(dropout)
            .init(&device);
        let x = Tensor::<3>::random([8, 64, 64], Distribution::Default, &device);
        let of_f32 = held(|| forward(&model, x.clone()));
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let unedited = Autocast::new(dtype).cached();
            let run = || unedited.run(&model, x.clone(), forward).unwrap();
            let (prepared, region) = AutocastConfig::new(dtype).prepare(model.clone()).unwrap();
            let in_region = || {
                let run = |x| prepared.forward(TransformerEncoderInput::new(x));
                region.forward(x.clone(), run).square().mean()
            };
            let (run, in_region) = (held(run), held(in_region));
            println!(
                "norm first {norm_first}, dropout {dropout}, {dtype:?}: {:.3} unedited, {:.3} in a \
                 region",
                run / of_f32,
                in_region / of_f32
            );
            assert!(
                run <= GOAL * in_region,
                "{run} bytes, {in_region} in a region"
            );
        }
    }
}

/// A product with a weight without gradient keeps the weight as it is, not another copy of it.
#[test]
fn frozen_weights_have_no_copy() {
    const WIDTH: usize = 512;
    let _alone = alone();
    let device = Device::flex().autodiff();
    let layer = || LinearConfig::new(WIDTH, WIDTH).init(&device);
    let model = (layer(), [layer(), layer(), layer()].map(Module::freeze));
    let x = Tensor::<2>::random([2, WIDTH], Distribution::Default, &device);
    let autocast = Autocast::new(FloatDType::BF16).cached();
    let bytes = held(|| {
        let forward = |model: &(Linear, [Linear; 3]), x| {
            let x = model.0.forward(x);
            model.1.iter().fold(x, |x, layer| layer.forward(x)).sum()
        };
        autocast.run(&model, x.clone(), forward).unwrap()
    });
    assert!(bytes < (WIDTH * WIDTH) as f64, "{bytes} bytes");
}

/// The records of a model and of its optimizer are never in memory together; of what is written, one
/// tensor more.
#[test]
fn a_checkpoint_holds_the_record_of_the_optimizer_and_a_tensor() {
    const LAYERS: usize = 8;
    const TENSOR: usize = 4 * 512 * 512;
    const MOMENTS: usize = 2 * LAYERS * TENSOR;
    let _alone = alone();
    let device = Device::flex().autodiff();
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let mut optim = AdamWConfig::new().init();
    let mut scaler = GradScalerConfig::new(LossScale::Static(8.0))
        .init()
        .unwrap();
    let layer = |_| LinearConfig::new(512, 512).init(&device);
    let model: Vec<Linear> = (0..LAYERS).map(layer).collect();
    let x = Tensor::<2>::ones([1, 512], &device);
    let y = model.iter().fold(x, |x, layer| layer.forward(x));
    let loss = scaler.scale(y.sum()).unwrap();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let model = scaler.step(&mut optim, 1e-3, model, grads).unwrap();

    let most = most_during(|| checkpoints.save(1, &model, &optim, &scaler).unwrap());
    let expected = MOMENTS + TENSOR;
    assert!(most < expected + TENSOR / 2, "{most} of {expected}");
}

/// 256 MiB of gradients, of which an eighth may be in memory.
#[test]
fn gradients_on_disk_are_pruned_by_in_a_part_of_their_bytes() {
    const SIDE: usize = 512;
    const SAMPLES: usize = 256;
    let _alone = alone();
    let device = Device::flex();
    let bytes = GradientMatrix::bytes_needed(SAMPLES, SIDE * SIDE, FloatDType::F32);
    let folder = tempfile::tempdir().unwrap();
    let model = LinearConfig::new(SIDE, SIDE).with_bias(false).init(&device);
    let x = Tensor::<2>::random([SAMPLES, SIDE], Distribution::Default, &device);
    let loss = |model: &Linear, x: &Tensor<2>| model.forward(x.clone()).square().mean();
    let solver = SolverConfig::new(Budget::Sparsity(0.75));
    let ridge = RidgeChoice::Fixed(1e-2);
    let in_memory = FisherConfig::new(SAMPLES).with_progress(false);
    let on_disk = in_memory
        .clone()
        .with_memory_bound(bytes / 8)
        .with_on_disk(Some(folder.path().into()));
    // Products of matrices take room in each thread once, twice what the caches hold: a run before those
    // that count does that.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1);
    let pool = pool.build().unwrap();
    let [_, on_disk, in_memory] = [on_disk.clone(), on_disk, in_memory].map(|fisher| {
        let pruner = PrunerConfig::new(solver.clone(), fisher).with_ridge(ridge.clone());
        most_during(|| {
            let prune = || pruner.prune(model.clone(), loss, |_| [x.clone()]).unwrap();
            let pruned = pool.install(prune);
            assert_eq!(pruned.masks.nonzeros(), SIDE * SIDE / 4);
            assert_eq!(pruned.stages[0].gradients.bytes, bytes);
        })
    });
    println!("{on_disk} bytes on disk, {in_memory} in memory, of {bytes}");
    assert!(
        on_disk + bytes * 3 / 4 < in_memory,
        "{on_disk}, {in_memory}"
    );
}

/// Storms of overflows, and single ones.
fn overflows(step: u32) -> bool {
    step % 500 < 40 || step.is_multiple_of(97)
}

/// `LEAN_CASES=50` takes 100,000 steps.
#[test]
fn training_through_storms_of_overflows_grows_in_no_memory() {
    const WARM: u32 = 1_000;
    let _alone = alone();
    let device = Device::flex().autodiff();
    let rule = DynamicLossScale {
        init_scale: 1024.0,
        growth_interval: 20,
        min_scale: 1.0,
        // No gradient overflows by itself.
        max_scale: 1024.0,
        ..DynamicLossScale::default()
    };
    let mut scaler: GradScaler = GradScalerConfig::new(LossScale::Dynamic(rule))
        .with_max_consecutive_skips(None)
        .init()
        .unwrap();
    let mut optim = AdamWConfig::new().init();
    let mut model = LinearConfig::new(2, 1).init(&device);
    let x = Tensor::<2>::from_floats([[1.0, 2.0]], &device);
    let autocast = Autocast::new(FloatDType::F16);
    let times = std::env::var("LEAN_CASES").map_or(1, |times| times.parse().unwrap());
    let (mut skipped, mut before, mut lowest) = (0, 0, f32::MAX);
    for step in 0..WARM + 2_000 * times {
        if step == WARM {
            before = HEAP.current_usage();
        }
        let factor = if overflows(step) { f32::INFINITY } else { 1.0 };
        let loss = autocast.run(&model, x.clone(), |model, x| {
            (model.forward(x) - 1.0).square().mean()
        });
        let loss = scaler.scale(loss.unwrap() * factor).unwrap();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = scaler.step(&mut optim, 1e-3, model, grads).unwrap();
        skipped += u64::from(overflows(step));
        let state = scaler.to_record().state;
        assert_eq!(
            (state.steps, state.skipped_steps),
            (u64::from(step) + 1, skipped)
        );
        assert!(state.scale >= rule.min_scale && state.scale.log2().fract() == 0.0);
        lowest = lowest.min(state.scale);
    }
    let grown = HEAP.current_usage().saturating_sub(before);
    assert!(
        grown < 16 << 10,
        "{grown} bytes more than after {WARM} steps"
    );
    assert_eq!(lowest, rule.min_scale);
    let y = model.forward(x).into_scalar::<f32>();
    assert!((y - 1.0).abs() < 0.1, "{y}");
}

/// The patches of a batch of images would take nine times its memory, and twice that in F64.
#[test]
fn calibration_unfolds_no_whole_batch() {
    let _alone = alone();
    const BYTES: usize = 4 * 64 * 16 * 64 * 64;
    let device = Device::flex();
    let conv = Conv2dConfig::new([16, 16], [3, 3]).init(&device);
    let config = QatConfig::new().with_activation(None);
    let conv = config.prepare(conv).unwrap();
    let run = |images: usize| {
        let x = Tensor::<4>::ones([images, 16, 64, 64], &device);
        most_during(|| {
            let inputs = LayerInputs::collect(&conv, |conv| drop(conv.forward_q(x.clone())));
            let inputs = inputs.unwrap();
            let seen = &inputs.of("weight").unwrap()[0];
            assert_eq!((seen.samples(), seen.features()), (images * 62 * 62, 144));
        })
    };
    run(1);
    let most = run(64);
    // What the convolution itself gives is as large as its input.
    assert!(most < 4 * BYTES, "{most} of {BYTES}");
}

/// Of the ways to run a model, those that lost are gone before the next one is made: 128 MiB of F32 weights, as
/// codes of 4 bits, and as they are.
#[test]
fn compiling_an_engine_holds_few_copies_of_the_weights() {
    let _alone = alone();
    const WIDTH: usize = 2048;
    const LAYERS: usize = 8;
    const BYTES: usize = 4 * LAYERS * WIDTH * WIDTH;
    let device = Device::flex();
    let layer = |_| {
        LinearConfig::new(WIDTH, WIDTH)
            .with_bias(false)
            .init(&device)
    };
    let forward = |model: &Vec<Linear>, x: Tensor<2>| {
        let mut layers = model.iter();
        layers.by_ref().fold(x, |x, layer| layer.forward(x))
    };
    let x = Tensor::<2>::random([1, WIDTH], Distribution::Default, &device);
    let blocks = WeightGranularity::PerBlock { size: 32 };
    let weight = WeightConfig::int(4).with_granularity(blocks);
    let quantize = QatConfig::new().with_weight(weight).with_activation(None);
    let model: Vec<Linear> = (0..LAYERS).map(layer).collect();
    let quantized = quantize.prepare(model.clone()).unwrap();
    let (quantized, _) = ConvertConfig::new().convert(quantized).unwrap();
    for (model, most) in [(quantized, 3.6), (model, 4.2)] {
        let export = Export::record(&model, &x, forward).unwrap();
        let mut made = None;
        let grown = most_during(|| made = Some(EngineConfig::new().compile(export).unwrap()));
        let times = grown as f64 / BYTES as f64;
        println!(
            "{times:.2} times the F32 weights; {}",
            made.unwrap().report()
        );
        assert!(times < most, "{times:.2} times the F32 weights");
    }
}

/// Layers of 256 × 256 by GPTQ, one at a time: ten of them take what two do.
#[test]
fn blocks_are_compressed_in_the_memory_of_one() {
    let _alone = alone();
    const WIDTH: usize = 256;
    const BYTES: usize = 4 * WIDTH * WIDTH;
    let device = Device::flex();
    let x = Tensor::<2>::random([2 * WIDTH, WIDTH], Distribution::Default, &device);
    let most = |blocks: usize| {
        let load = |number: usize| -> Result<(String, Linear), OneShotError> {
            let layer = LinearConfig::new(WIDTH, WIDTH).init(&device);
            Ok((format!("layers.{number}"), layer))
        };
        most_during(|| {
            let done = OneShot::new(Preset::w4a16().with_group(32)).compress_blocks(
                [x.clone()],
                (0..blocks).map(load),
                |layer, x| layer.forward(x),
                |_, _| Ok(()),
            );
            assert_eq!(done.unwrap().report.blocks.len(), blocks);
        })
    };
    most(1);
    let (two, ten) = (most(2), most(10));
    println!("two: {two} bytes, ten: {ten}; a block has {BYTES}");
    assert!(ten < two + 4 * BYTES, "{ten}, of two blocks {two}");
}

/// 64 batches of 1 MiB, which two passes carry: in files, a few batches are in memory at once, also from one
/// block to the next.
#[test]
fn spilled_activations_are_in_memory_batch_by_batch() {
    let _alone = alone();
    const WIDTH: usize = 64;
    const ROWS: usize = 4096;
    const BATCHES: usize = 64;
    const BYTES: usize = 4 * WIDTH * ROWS;
    let device = Device::flex();
    let x = Tensor::<2>::random([ROWS, WIDTH], Distribution::Default, &device);
    let most = |spills: bool| {
        let load = |number: usize| -> Result<(String, Linear), OneShotError> {
            let layer = LinearConfig::new(WIDTH, WIDTH).init(&device);
            Ok((format!("layers.{number}"), layer))
        };
        let folder = tempfile::tempdir().unwrap();
        let mut oneshot = OneShot::new(Preset::w4a16().with_group(32));
        if spills {
            oneshot = oneshot.spilling_to(folder.path());
        }
        most_during(|| {
            let batches = vec![x.clone(); BATCHES];
            let forward = |layer: &Linear, x| layer.forward(x);
            let done = oneshot.compress_blocks(batches, (0..3).map(load), forward, |_, _| Ok(()));
            done.unwrap();
        })
    };
    most(true);
    let (memory, files) = (most(false), most(true));
    println!("in memory: {memory} bytes, in files: {files}; a batch has {BYTES}");
    assert!(memory > BATCHES * BYTES, "{memory}");
    assert!(files < BATCHES * BYTES / 4, "{files}");
}

/// Layers of floats of 16 MiB each, turned for the file: their bytes and those of the file, not a slice for each number
/// (ten times as much).
#[test]
fn folders_of_floats_take_the_memory_of_their_tensors() {
    let _alone = alone();
    const WIDTH: usize = 2048;
    const BYTES: usize = 4 * WIDTH * WIDTH;
    let device = Device::flex();
    let layer = || -> Linear {
        let layer: Linear = LinearConfig::new(WIDTH, WIDTH)
            .with_bias(false)
            .init(&device);
        // It is made when it is first asked for.
        let _ = layer.weight.val();
        layer
    };
    let (head, fresh) = (layer(), layer());
    let folder = tempfile::tempdir().unwrap();
    let mut writer = PretrainedFolder::create(folder.path()).unwrap();
    let written = most_during(|| writer.add(&head, str::to_string).unwrap());
    writer.finish(serde_json::json!({})).unwrap();
    let read = most_during(|| {
        load_pretrained(fresh, folder.path(), str::to_string).unwrap();
    });
    println!("written: {written} bytes, read: {read}; the layer has {BYTES}");
    assert!(written < 4 * BYTES, "{written}");
    assert!(read < 6 * BYTES, "{read}");
}

/// A file of floats is written tensor by tensor: its bytes and those on their way, but no buffer of all of them.
#[test]
fn files_of_compressed_models_are_written_tensor_by_tensor() {
    let _alone = alone();
    const WIDTH: usize = 1024;
    const LAYERS: usize = 8;
    const BYTES: usize = 4 * LAYERS * WIDTH * WIDTH;
    let device = Device::flex();
    let layers = (0..LAYERS).map(|_| {
        let layer: Linear = LinearConfig::new(WIDTH, WIDTH)
            .with_bias(false)
            .init(&device);
        let _ = layer.weight.val();
        layer
    });
    let done = Compressed {
        model: layers.collect::<Vec<_>>(),
        report: Report::default(),
        weights: Vec::new(),
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ends.safetensors");
    let most = most_during(|| done.save(&file).unwrap());
    println!("{most} bytes; the layers have {BYTES}");
    assert!(most < 9 * BYTES / 4, "{most}");
}
