//! What reads bytes that others wrote, one function for each kind of file: `Ok` where the bytes were
//! taken, the error where they were refused. The fuzz targets of `fuzz/` call these, too.

#[path = "seals.rs"]
mod seals;

use std::path::{Path, PathBuf};

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::relu;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_lean::amp::{Checkpoints, GradScaler, GradScalerConfig, scaler::GradScalerRecord};
use burn_lean::deploy::{EngineConfig, Export, Form};
use burn_lean::oneshot::{OneShot, Preset, load_compressed};
use burn_lean::prune::{
    Budget, FisherConfig, Masks, PrunerConfig, RidgeChoice, Selection, SolverConfig, SparseRecord,
    SparsitySchedule,
};
use burn_lean::quant::{
    PtqConfig, QatConfig, QuantizedForward, Scheme, WeightConfig,
    deploy::{load_compressed_tensors, save_compressed_tensors},
    load_safetensors, save_safetensors,
};
use burn_lean::recipe::{Numbers, Recipe, RecipeError, Run, Task, TrainStage};

/// A parser, with sound bytes to begin with.
pub(crate) struct Target {
    /// That of the fuzz target.
    pub(crate) name: &'static str,
    pub(crate) parse: fn(&[u8]) -> Result<(), String>,
    pub(crate) sound: fn() -> Vec<Vec<u8>>,
}

/// All of them.
pub(crate) const TARGETS: [Target; 11] = [
    target("quantized_file", quantized_file, quantized_files),
    target(
        "compressed_tensors",
        compressed_tensors,
        all_compressed_tensors,
    ),
    target("sparse_record", sparse_record, sparse_records),
    target("json_values", json_values, all_json_values),
    target("oneshot_file", oneshot_file, oneshot_files),
    target("oneshot_state", oneshot_state, oneshot_states),
    target("prune_stage", prune_stage, prune_stages),
    target("checkpoint", checkpoint, checkpoints),
    target("onnx_file", onnx_file, onnx_files),
    target("recipe_text", recipe_text, recipe_texts),
    target("recipe_state", recipe_state, recipe_states),
];

const fn target(
    name: &'static str,
    parse: fn(&[u8]) -> Result<(), String>,
    sound: fn() -> Vec<Vec<u8>>,
) -> Target {
    Target { name, parse, sound }
}

/// Two layers, the first of which is pruned or quantized.
#[derive(Module, Debug)]
pub(crate) struct Net {
    first: Linear,
    second: Linear,
}

impl Net {
    pub(crate) fn new(device: &Device) -> Self {
        let linear = |salt: usize, shape: [usize; 2]| {
            let mut linear = LinearConfig::new(shape[0], shape[1]).init(device);
            let count = shape[0] * shape[1];
            let weights = (0..count).map(|at| ((at * 37 + salt) % 23) as f32 / 11.0 - 1.0);
            let weights = TensorData::new(weights.collect::<Vec<f32>>(), shape);
            linear.weight = Param::from_data(weights, device);
            linear.bias = Some(Param::from_tensor(Tensor::zeros([shape[1]], device)));
            linear
        };
        Self {
            first: linear(3, [8, 6]),
            second: linear(5, [6, 4]),
        }
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(relu(self.first.forward(x)))
    }
}

fn inputs(device: &Device) -> Tensor<2> {
    let values = (0..16 * 8).map(|at| ((at * 29 + 7) % 31) as f32 / 15.0 - 1.0);
    let values = TensorData::new(values.collect::<Vec<f32>>(), [16, 8]);
    Tensor::from_data(values, device)
}

/// A folder of its own, with these files.
fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (name, bytes) in files {
        let path = folder.path().join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).expect("a folder");
        }
        std::fs::write(path, bytes).expect("a file");
    }
    folder
}

fn read(folder: &Path, name: &str) -> Vec<u8> {
    std::fs::read(folder.join(name)).expect("a file that was written")
}

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Several files in one input of a fuzzer: each with the length before it.
fn joined(parts: &[&[u8]]) -> Vec<u8> {
    let with_length = |part: &&[u8]| [&(part.len() as u32).to_le_bytes(), *part].concat();
    parts.iter().flat_map(with_length).collect()
}

/// The first parts of [`joined`] bytes; what is missing is empty.
fn parts<const N: usize>(mut bytes: &[u8]) -> [&[u8]; N] {
    [(); N].map(|()| {
        let Some((length, rest)) = bytes.split_first_chunk::<4>() else {
            return &[][..];
        };
        let length = (u32::from_le_bytes(*length) as usize).min(rest.len());
        let (part, after) = rest.split_at(length);
        bytes = after;
        part
    })
}

fn prepared(device: &Device) -> Net {
    let config = QatConfig::new().with_weight(WeightConfig::int(4));
    config.prepare(Net::new(device)).expect("linear layers")
}

fn quantized(ptq: &PtqConfig, device: &Device) -> Net {
    let quantized = ptq.quantize(
        Net::new(device),
        || [inputs(device)],
        |net, x| QuantizedForward::new().run(net, x, Net::forward),
    );
    quantized.expect("finite numbers").0
}

/// Parses a safetensors file with the checksum that it should have, so that what is behind the checksum is
/// reached, and then as it is.
fn sealed_and_as_it_is(
    bytes: &[u8],
    parse: impl Fn(&[u8]) -> Result<(), String>,
) -> Result<(), String> {
    drop(parse(&seals::safetensors(bytes)));
    parse(bytes)
}

/// Loads a file into the model as it is and as it is prepared, and runs both; refused where both are.
fn loads<E: std::fmt::Display>(
    bytes: &[u8],
    load: impl Fn(Net, PathBuf) -> Result<Net, E>,
) -> Result<(), String> {
    let folder = folder(&[("model.safetensors", bytes)]);
    let device = Device::flex();
    let nets = [Net::new(&device), prepared(&device)];
    let [plain, prepared] = nets.map(|net| -> Result<(), String> {
        let net = load(net, folder.path().join("model.safetensors")).map_err(said)?;
        net.forward(inputs(&device)).into_data();
        Ok(())
    });
    plain.or(prepared)
}

pub(crate) fn quantized_file(bytes: &[u8]) -> Result<(), String> {
    sealed_and_as_it_is(bytes, |bytes| loads(bytes, load_safetensors))
}

fn quantized_files() -> Vec<Vec<u8>> {
    let device = Device::flex();
    let weights = QatConfig::new().with_activation(None);
    let files = [
        weights.clone().with_weight(WeightConfig::int(4)),
        weights.with_weight(WeightConfig::int(8)),
        QatConfig::new().with_weight(WeightConfig::int(4)),
    ];
    // The last one says activations in its metadata.
    let written = files.map(|config| {
        let ptq = PtqConfig::new().with_quantize(config).with_progress(false);
        let net = quantized(&ptq, &device);
        let folder = folder(&[]);
        let path = folder.path().join("model.safetensors");
        save_safetensors(&net, &path).expect("a file");
        read(folder.path(), "model.safetensors")
    });
    written.into()
}

pub(crate) fn compressed_tensors(bytes: &[u8]) -> Result<(), String> {
    // As another program's, without a checksum.
    let mut unsealed = bytes.to_vec();
    let name = b"crc32";
    if let Some(at) = unsealed.windows(name.len()).position(|part| part == name) {
        unsealed[at..at + name.len()].copy_from_slice(b"other");
    }
    let outcome = loads(bytes, load_compressed_tensors);
    loads(&unsealed, load_compressed_tensors).and(outcome)
}

/// Codes in words, codes in bytes with ranges of inputs, and weights without the zeros of 2:4.
fn all_compressed_tensors() -> Vec<Vec<u8>> {
    let device = Device::flex();
    let of_bits = |config: QatConfig| {
        let ptq = PtqConfig::new().with_quantize(config).with_progress(false);
        quantized(&ptq, &device)
    };
    let words = QatConfig::new().with_weight(WeightConfig::int(4));
    let mut sparse = Net::new(&device);
    sparse.first.weight = sparse.first.weight.map(|weight| {
        let kept = (0..8 * 6).map(|at| ((at / 6) % 4 / 2) as f32);
        let kept = TensorData::new(kept.collect::<Vec<f32>>(), [8, 6]);
        let gone = Tensor::<2>::from_data(kept, &device).equal_elem(0.0);
        weight.mask_fill(gone, 0.0)
    });
    let nets = [
        of_bits(words.with_activation(None)),
        of_bits(QatConfig::new().with_weight(WeightConfig::int(8))),
        sparse,
    ];
    let written = nets.map(|net| {
        let folder = folder(&[]);
        let path = folder.path().join("model.safetensors");
        save_compressed_tensors(&net, &path).expect("a file");
        read(folder.path(), "model.safetensors")
    });
    written.into()
}

pub(crate) fn sparse_record(bytes: &[u8]) -> Result<(), String> {
    let sealed = seals::record(bytes);
    let mut outcome = Ok(());
    for bytes in [bytes, &sealed] {
        outcome = SparseRecord::from_bytes(bytes)
            .map_err(said)
            .and_then(|record| {
                record.sizes().map_err(said)?;
                let device = Device::flex();
                let net = record.load_into(Net::new(&device)).map_err(said)?;
                net.forward(inputs(&device)).into_data();
                Ok(())
            });
    }
    outcome
}

fn pruned(device: &Device) -> Net {
    let mut net = Net::new(device);
    net.first.weight = net.first.weight.map(|weight| {
        let small = weight.clone().abs().lower_elem(0.7);
        weight.mask_fill(small, 0.0)
    });
    net
}

fn sparse_records() -> Vec<Vec<u8>> {
    let device = Device::flex();
    let record = |net: &Net| {
        let record = SparseRecord::from_module(net).expect("tensors");
        record.to_bytes().expect("JSON")
    };
    vec![record(&Net::new(&device)), record(&pruned(&device))]
}

pub(crate) fn json_values(bytes: &[u8]) -> Result<(), String> {
    let device = Device::flex();
    let masks = serde_json::from_slice::<Masks>(bytes)
        .map_err(said)
        .and_then(|masks| {
            masks.attach(Net::new(&device)).map_err(said)?;
            Ok(())
        });
    let scaler = serde_json::from_slice::<GradScalerRecord>(bytes)
        .map_err(said)
        .and_then(|record| {
            let mut scaler = GradScaler::from_record(record).map_err(said)?;
            let net = Net::new(&device.clone().autodiff());
            for _ in 0..3 {
                let loss = net
                    .forward(inputs(&device.clone().autodiff()))
                    .square()
                    .mean();
                let grads = scaler.scale(loss).map_err(said)?.backward();
                let grads = burn::optim::GradientsParams::from_grads(grads, &net);
                let mut optim = AdamWConfig::new().init();
                scaler
                    .step(&mut optim, 1e-3, net.clone(), grads)
                    .map_err(said)?;
            }
            Ok(())
        });
    let preset = serde_json::from_slice::<Preset>(bytes)
        .map_err(said)
        .and_then(|preset| preset.validate().map_err(said));
    let scheme = serde_json::from_slice::<Scheme>(bytes)
        .map_err(said)
        .and_then(|scheme| scheme.group_count(&[8, 32]).map_err(said).map(|_| ()));
    masks.or(scaler).or(preset).or(scheme)
}

fn all_json_values() -> Vec<Vec<u8>> {
    let device = Device::flex();
    let net = pruned(&device);
    let selection = Selection::of(&net, None).expect("weights");
    let support: Vec<usize> = (0..selection.layout().len()).step_by(3).collect();
    let masks = Masks::from_support(selection.layout(), &support).expect("weights");
    let scaler = GradScalerConfig::for_dtype(FloatDType::F16)
        .init()
        .expect("defaults");
    let preset: Preset = "sparse-2:4-w4a16-g32".parse().expect("a preset");
    let written = [
        serde_json::to_vec(&masks),
        serde_json::to_vec(&scaler.to_record()),
        serde_json::to_vec(&preset),
        serde_json::to_vec(&Scheme::nvfp4(burn_lean::quant::format::ScaleRounding::Up)),
    ];
    written.map(|json| json.expect("JSON")).into()
}

pub(crate) fn oneshot_file(bytes: &[u8]) -> Result<(), String> {
    sealed_and_as_it_is(bytes, |bytes| {
        let folder = folder(&[("model.safetensors", bytes)]);
        let path = folder.path().join("model.safetensors");
        let device = Device::flex();
        let net = load_compressed(Net::new(&device), path).map_err(said)?;
        net.model.forward(inputs(&device)).into_data();
        Ok(())
    })
}

fn compress(preset: &str, state: Option<PathBuf>) -> Result<Vec<u8>, String> {
    let device = Device::flex();
    let mut oneshot = OneShot::new(preset.parse().map_err(said)?);
    if let Some(state) = state {
        oneshot = oneshot.with_state(state);
    }
    let done = oneshot.compress(Net::new(&device), [inputs(&device)], |net, x| {
        net.forward(x)
    });
    let done = done.map_err(said)?;
    let folder = folder(&[]);
    let path = folder.path().join("model.safetensors");
    done.save(&path).map_err(said)?;
    Ok(read(folder.path(), "model.safetensors"))
}

fn oneshot_files() -> Vec<Vec<u8>> {
    let files = ["w4a16-g3", "sparse-0.7", "sparse-0.5-w8a16"].map(|preset| compress(preset, None));
    files.map(|file| file.expect("a layer")).into()
}

const BLOCKS: [&str; 2] = ["manifest.json", "block-0000.safetensors"];

pub(crate) fn oneshot_state(bytes: &[u8]) -> Result<(), String> {
    let [manifest, block] = parts(bytes);
    sealed_and_as_it_is(block, |block| {
        let files = BLOCKS.into_iter().zip([manifest, block]);
        let folder = folder(&files.collect::<Vec<_>>());
        compress("w4a16-g3", Some(folder.path().into())).map(|_| ())
    })
}

fn oneshot_states() -> Vec<Vec<u8>> {
    let folder = folder(&[]);
    compress("w4a16-g3", Some(folder.path().into())).expect("layers");
    let files = BLOCKS.map(|name| read(folder.path(), name));
    vec![joined(&[&files[0], &files[1]])]
}

fn prune(state: &Path) -> Result<(), String> {
    let device = Device::flex().autodiff();
    let config = PrunerConfig::new(
        SolverConfig::new(Budget::Sparsity(0.5)),
        FisherConfig::new(8).with_progress(false),
    )
    .with_stages(2)
    .with_schedule(SparsitySchedule::Exponential { base: 0.2 })
    .with_ridge(RidgeChoice::Fixed(1e-2))
    .with_state(Some(state.into()));
    let loss = |net: &Net, x: &Tensor<2>| net.forward(x.clone()).square().mean();
    let pruned = config.prune(Net::new(&device), loss, |_| [inputs(&device)]);
    pruned.map(|_| ()).map_err(said)
}

const STAGE: [&str; 2] = ["stage-1/model.bpk", "stage-1/stage.json"];

pub(crate) fn prune_stage(bytes: &[u8]) -> Result<(), String> {
    let [model, stage] = parts(bytes);
    let checksums = format!(
        "{{\"model\":{},\"stage\":{}}}",
        seals::crc32(model),
        seals::crc32(stage)
    );
    let checksums = ("stage-1/checksums.json", checksums.as_bytes());
    let folder = folder(&[(STAGE[0], model), (STAGE[1], stage), checksums]);
    prune(folder.path())
}

fn prune_stages() -> Vec<Vec<u8>> {
    let folder = folder(&[]);
    prune(folder.path()).expect("weights");
    let files = STAGE.map(|name| read(folder.path(), name));
    vec![joined(&[&files[0], &files[1]])]
}

const CHECKPOINT: [&str; 3] = ["model.bpk", "optimizer.bpk", "scaler.json"];

pub(crate) fn checkpoint(bytes: &[u8]) -> Result<(), String> {
    let [model, optimizer, scaler] = parts(bytes);
    let contents = [model, optimizer, scaler];
    let listed = CHECKPOINT.iter().zip(contents).map(|(name, bytes)| {
        let (length, crc32) = (bytes.len(), seals::crc32(bytes));
        format!("{{\"name\":\"{name}\",\"bytes\":{length},\"crc32\":{crc32}}}")
    });
    let listed = listed.collect::<Vec<_>>().join(",");
    let manifest = format!("{{\"version\":1,\"step\":1,\"files\":[{listed}]}}");
    let folder = folder(&[
        ("step-1/model.bpk", model),
        ("step-1/optimizer.bpk", optimizer),
        ("step-1/scaler.json", scaler),
        ("step-1/manifest.json", manifest.as_bytes()),
    ]);
    let device = Device::flex().autodiff();
    let checkpoints = Checkpoints::new(folder.path());
    let loaded = checkpoints.load(1, Net::new(&device), AdamWConfig::new().init());
    let (net, mut optim, mut scaler) = loaded.map_err(said)?;
    let loss = net.forward(inputs(&device)).square().mean();
    let grads = scaler.scale(loss).map_err(said)?.backward();
    let grads = burn::optim::GradientsParams::from_grads(grads, &net);
    scaler.step(&mut optim, 1e-3, net, grads).map_err(said)?;
    Ok(())
}

fn checkpoints() -> Vec<Vec<u8>> {
    let device = Device::flex().autodiff();
    let folder = folder(&[]);
    let mut net = Net::new(&device);
    let mut optim = AdamWConfig::new().init();
    let mut scaler = GradScalerConfig::for_dtype(FloatDType::F16)
        .init()
        .expect("defaults");
    let loss = scaler.scale(net.forward(inputs(&device)).square().mean());
    let grads = loss.expect("a number").backward();
    let grads = burn::optim::GradientsParams::from_grads(grads, &net);
    net = scaler.step(&mut optim, 1e-3, net, grads).expect("finite");
    let checkpoints = Checkpoints::new(folder.path());
    checkpoints
        .save(1, &net, &optim, &scaler)
        .expect("a folder");
    let files = CHECKPOINT.map(|name| read(&folder.path().join("step-1"), name));
    vec![joined(&[&files[0], &files[1], &files[2]])]
}

pub(crate) fn onnx_file(bytes: &[u8]) -> Result<(), String> {
    let folder = folder(&[("model.onnx", bytes)]);
    let file = EngineConfig::new()
        .open(folder.path().join("model.onnx"))
        .map_err(said)?;
    file.run(vec![inputs(&Device::flex()).into_data()])
        .map(|_| ())
        .map_err(said)
}

fn onnx_files() -> Vec<Vec<u8>> {
    let device = Device::flex();
    let ptq = PtqConfig::new().with_progress(false);
    let models = [Net::new(&device), quantized(&ptq, &device)];
    let written = models.map(|net| {
        let export = Export::record(&net, &inputs(&device), |net: &Net, x| net.forward(x));
        let onnx = export.and_then(|export| export.to_onnx(Form::Qdq));
        onnx.and_then(|onnx| onnx.model.to_bytes()).expect("layers")
    });
    written.into()
}

pub(crate) fn recipe_text(bytes: &[u8]) -> Result<(), String> {
    let text = std::str::from_utf8(bytes).map_err(said)?;
    let parsed = Recipe::from_toml(text).map_err(said);
    let parsed = parsed.or(Recipe::from_json(text).map_err(said));
    let numbers = text.parse::<Numbers>().map(|_| ());
    let preset = text.parse::<Preset>().map_err(said);
    let preset = preset.and_then(|preset| preset.validate().map_err(said));
    let recipe = match parsed {
        Ok(recipe) => recipe,
        Err(error) => return numbers.or(preset).map_err(|_| error),
    };
    if recipe.seed < i64::MAX as u64 {
        let again = Recipe::from_toml(&recipe.to_toml().map_err(said)?);
        assert_eq!(
            again.ok().as_ref(),
            Some(&recipe),
            "what was written reads back"
        );
    }
    Ok(())
}

fn recipe_texts() -> Vec<Vec<u8>> {
    let whole = r#"
        seed = 7
        dtype = "f16"
        fallback = "emulate"
        checkpoint_steps = 3
        export = ["record", "safetensors", "onnx"]
        train = { epochs = 2, learning_rate = 0.01, schedule = "cosine", warmup = 0.1, max_norm = 1.0 }
        [prune]
        method = "gradual"
        sparsity = 0.9
        stages = 4
        samples = 100
        exclude = ["head"]
        [prune.tune]
        epochs = 1
        learning_rate = 0.001
        schedule = "cosine"
        distillation = { temperature = 4.0, weight = 0.5 }
        [[quantize]]
        weights = "int4"
        block = 32
        train = { epochs = 1, learning_rate = 0.001 }
        [[quantize]]
        activations = "none"
        rounding = "gptq"
        calibration = 3
        exclude = ["a*"]
    "#;
    let recipe = Recipe::from_toml(whole).expect("a recipe");
    let presets = ["sparse-0.5-w4a16-g32-sym", "uint8"];
    let texts = [whole, &recipe.to_json()].map(|text| text.as_bytes().to_vec());
    let presets = presets.map(|text| text.as_bytes().to_vec());
    [texts, presets].concat()
}

fn run(state: &Path) -> Result<(), String> {
    let device = Device::flex().autodiff();
    let task = Task::new(
        |net: &Net, x: Tensor<2>| net.forward(x),
        |y: Tensor<2>, target: Tensor<2>| (y - target).square().mean(),
        |_| {
            let device = Device::flex().autodiff();
            [(inputs(&device), inputs(&device).slice([0..16, 0..4]))]
        },
    )
    .with_evaluation(|_| Ok::<_, RecipeError>(50.0));
    let recipe = Recipe::new().with_train(TrainStage::new(1, 1e-3));
    let outcome = Run::new(&recipe)
        .with_state(state)
        .run(Net::new(&device), &task);
    outcome.map(|_| ()).map_err(said)
}

const STATE: [&str; 3] = ["run.json", "0-train/model.bpk", "0-train/stage.toml"];

pub(crate) fn recipe_state(bytes: &[u8]) -> Result<(), String> {
    let [begun, model, stage] = parts(bytes);
    let parse = |stage: &[u8]| {
        let folder = folder(&[(STATE[0], begun), (STATE[1], model), (STATE[2], stage)]);
        run(folder.path())
    };
    // What reads it does not panic; what comes of it is of the file as it is.
    drop(parse(&seals::stage(stage, model)));
    parse(stage)
}

fn recipe_states() -> Vec<Vec<u8>> {
    let folder = folder(&[]);
    run(folder.path()).expect("a stage");
    let files = STATE.map(|name| read(folder.path(), name));
    vec![joined(&[&files[0], &files[1], &files[2]])]
}
