//! MLPerf Tiny's classifier: quantized with some training images, measured on two test sets, and
//! written as ONNX.

use std::error::Error;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_lean::deploy::{EngineConfig, Export, Form, OnnxFile};
use burn_lean::prune::{Budget, Pruner};
use burn_lean::quant::{PtqConfig, QuantizedForward, fold_for};

use crate::options::Cli;
use crate::support::{self, Batch, Cell, Images, ResNet8, Table, read_cifar_part};

/// Images per forward pass.
const BATCH_SIZE: usize = 100;

/// A test set, with what FP32 says of each image.
struct TestSet {
    name: &'static str,
    images: Images,
    float: Vec<i64>,
}

pub(crate) fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    let (Some(data), Some(checkpoint)) = (&cli.data, &cli.checkpoint) else {
        return Err("`--arch resnet8` needs `--data` and `--checkpoint`".into());
    };
    let device = cli.device.open()?;
    let training = device.clone().autodiff();
    let read = |prefix| read_cifar_part(data, prefix).map(Images::in_bytes);
    let limit = |images: Images| match cli.test_limit {
        Some(limit) => images.take(limit),
        None => images,
    };
    let (train, tests) = match read("original_train_") {
        Ok(train) => {
            let tests = vec![("original", "original_test_"), ("jpeg", "test_batch")];
            (train, tests)
        }
        // The binary version as it is published.
        Err(_) => (read("data_batch_")?, vec![("standard", "test_batch")]),
    };
    let count = cli.calibration(train.len())?;
    let calibration: Vec<Batch> = train.take(count).ordered(BATCH_SIZE, &device).collect();

    let float = support::load(ResNet8::new(&training), checkpoint)?;
    let one = Tensor::<4>::ones([1, 3, 32, 32], &device);
    let quantized = QuantizedForward::new();
    let mut sets = Vec::new();
    for (name, prefix) in tests {
        let images = limit(read(prefix)?);
        let float = predictions(&images, &device, |x| Ok(float.valid().forward(x)))?;
        sets.push(TestSet {
            name,
            images,
            float,
        });
    }
    let mut table = Table::new(
        format!("ResNet8, quantized with {count} training images"),
        &["variant", "data", "accuracy", "agreement"],
    );
    let mut measure = |variant: &str,
                       forward: &dyn Fn(Tensor<4>) -> Result<Tensor<2>, Box<dyn Error>>|
     -> Result<(), Box<dyn Error>> {
        for set in &sets {
            let found = predictions(&set.images, &device, forward)?;
            table.push([
                variant.into(),
                set.name.into(),
                Cell::Number(agreement(&found, set.images.labels()), 2),
                Cell::Number(agreement(&found, &set.float), 2),
            ]);
        }
        Ok(())
    };
    let evaluated = float.valid();
    measure("FP32", &|x| Ok(evaluated.forward(x)))?;

    let folded = fold_for(float.clone(), one.clone(), ResNet8::forward)?;
    let w8a8 = quantize(&cli.ptq_of(8), folded.clone(), &calibration)?;
    measure("W8A8", &|x| {
        Ok(quantized.run(&w8a8, x, ResNet8::forward)?)
    })?;

    // The same model out of Burn: as a file, and run by an engine.
    let export = Export::record(&w8a8, &one, |model: &ResNet8, x| model.forward(x))?;
    if let Some(path) = &cli.onnx {
        let exported = export.to_onnx(Form::Qdq)?;
        let bytes = exported.model.save(path)?;
        println!("{}: {bytes} bytes, opset 21, QDQ", path.display());
        let beside = path.with_extension("float.onnx");
        let forward = |model: &ResNet8, x| model.forward(x);
        let exported = Export::record(&evaluated, &one, forward)?.to_onnx(Form::Float)?;
        let bytes = exported.model.save(&beside)?;
        println!("{}: {bytes} bytes, F32", beside.display());
        let file: OnnxFile = EngineConfig::new().open(path)?;
        measure("W8A8, ONNX file", &|x| {
            let device = x.device();
            let logits = file.run(vec![x.into_data()])?.swap_remove(0);
            Ok(Tensor::from_data(logits, &device))
        })?;
    }
    let engine = EngineConfig::new().compile(export)?;
    println!("{}", engine.report());
    measure("W8A8, engine", &|x| Ok(engine.run(&x)?))?;

    let w4a8 = quantize(&cli.ptq_of(4), folded, &calibration)?;
    measure("W4A8", &|x| {
        Ok(quantized.run(&w4a8, x, ResNet8::forward)?)
    })?;

    // Half of the weights are zero, chosen with the same images; then as above.
    let inputs = calibration.iter().map(|batch| batch.images.clone());
    let pruner = Pruner::new(Budget::Sparsity(0.5));
    let pruned = pruner.prune(float, ResNet8::forward, inputs)?;
    let evaluated = pruned.model.valid();
    measure("pruned 50 %", &|x| Ok(evaluated.forward(x)))?;
    let folded = fold_for(pruned.model, one, ResNet8::forward)?;
    let both = quantize(&cli.ptq_of(8), folded, &calibration)?;
    measure("pruned 50 %, W8A8", &|x| {
        Ok(quantized.run(&both, x, ResNet8::forward)?)
    })?;

    table.publish(cli.json.as_deref())?;
    Ok(())
}

/// Scales of the weights for each channel, ranges of the activations from the calibration images.
fn quantize(
    config: &PtqConfig,
    float: ResNet8,
    calibration: &[Batch],
) -> Result<ResNet8, Box<dyn Error>> {
    let batches = || calibration.iter().map(|batch| batch.images.clone());
    let (model, _) = config.quantize_for(float, batches, ResNet8::forward)?;
    Ok(model.valid())
}

fn predictions(
    images: &Images,
    device: &Device,
    forward: impl Fn(Tensor<4>) -> Result<Tensor<2>, Box<dyn Error>>,
) -> Result<Vec<i64>, Box<dyn Error>> {
    let bar = support::progress(images.len().div_ceil(BATCH_SIZE), "images");
    let mut found = Vec::with_capacity(images.len());
    for batch in images.ordered(BATCH_SIZE, device) {
        let classes = forward(batch.images)?.argmax(1);
        found.extend(classes.into_data().iter::<i64>());
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(found)
}

/// How many of two lists of classes are the same [percent].
fn agreement(found: &[i64], expected: &[i64]) -> f64 {
    let same = found.iter().zip(expected).filter(|(a, b)| a == b).count();
    100.0 * same as f64 / found.len().max(1) as f64
}
