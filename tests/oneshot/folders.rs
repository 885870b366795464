//! Checkpoints as they come from Hugging Face: a folder with a configuration and shards.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, Tensor, TensorData};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::checkpoints::{near, write};
use crate::llama::{Llama, RopeScaling, Sizes};
use crate::pretrained::Pretrained;
use crate::support::{scratch, values, with_numbers};
use crate::{SMALL, tokens};

const INDEX: &str = "model.safetensors.index.json";

/// The small model in three shards, as `model.safetensors` of another folder, and what it says of itself.
struct Folder {
    folder: TempDir,
    whole: TempDir,
    config: Value,
}

impl Folder {
    fn new(own_head: bool) -> Self {
        let sizes = Sizes { own_head, ..SMALL };
        let [folder, whole] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let model = with_numbers(sizes.init(&Device::flex()), 11);
        let file = whole.path().join("model.safetensors");
        write(&model, &file, true);
        let config = json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": false,
            "hidden_act": "silu",
            "hidden_size": 16,
            "intermediate_size": 20,
            "max_position_embeddings": 16,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_scaling": null,
            "rope_theta": 10000.0,
            "tie_word_embeddings": !own_head,
            "torch_dtype": "float32",
            "vocab_size": 24,
        });
        let this = Self {
            folder,
            whole,
            config,
        };
        this.shard(|name| match name {
            name if name.contains("layers.0.mlp") => 2,
            name if name.contains("layers.1.") => 3,
            _ => 1,
        });
        fs::write(
            this.whole.path().join("config.json"),
            this.config.to_string(),
        )
        .unwrap();
        this.configure(|_| ());
        this
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn shard_path(&self, number: usize) -> PathBuf {
        self.path().join(shard_name(number))
    }

    /// Spreads the tensors over shards, and writes the index.
    fn shard(&self, number_of: impl Fn(&str) -> usize) {
        let bytes = fs::read(self.whole.path().join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut weight_map = BTreeMap::new();
        for number in 1..=3 {
            let mut tensors = file.tensors();
            tensors.retain(|(name, _)| number_of(name) == number);
            for (name, _) in &tensors {
                weight_map.insert(name.clone(), shard_name(number));
            }
            safetensors::serialize_to_file(tensors, None, &self.shard_path(number)).unwrap();
        }
        self.write_index(&weight_map);
    }

    fn index(&self) -> BTreeMap<String, String> {
        let text = fs::read(self.path().join(INDEX)).unwrap();
        let index: Value = serde_json::from_slice(&text).unwrap();
        serde_json::from_value(index["weight_map"].clone()).unwrap()
    }

    fn write_index(&self, weight_map: &BTreeMap<String, String>) {
        let index = json!({ "metadata": { "total_size": 1 }, "weight_map": weight_map });
        fs::write(self.path().join(INDEX), index.to_string()).unwrap();
    }

    /// Writes a changed configuration.
    fn configure(&self, change: impl Fn(&mut Value)) {
        let mut config = self.config.clone();
        change(&mut config);
        fs::write(self.path().join("config.json"), config.to_string()).unwrap();
    }

    fn set(&self, key: &str, value: Value) {
        self.configure(|config| config[key] = value.clone());
    }

    fn open(&self) -> Checkpoint {
        Checkpoint::open(self.path(), None, 16).unwrap()
    }

    /// What is wrong with it.
    fn refused(&self, heads: Option<usize>) -> CheckpointError {
        match Checkpoint::open(self.path(), heads, 16) {
            Ok(_) => panic!("it was taken"),
            Err(error) => *error.downcast::<CheckpointError>().unwrap(),
        }
    }
}

fn shard_name(number: usize) -> String {
    format!("model-{number:05}-of-00003.safetensors")
}

fn logits(model: &Llama) -> Vec<f32> {
    let batches = tokens(&Device::flex()).into_iter();
    batches
        .flat_map(|batch| values(model.forward(batch)))
        .collect()
}

#[test]
fn shards_give_the_logits_of_the_single_file_whole_and_by_blocks() {
    let device = Device::flex();
    for own_head in [false, true] {
        let folder = Folder::new(own_head);
        let file = folder.whole.path().join("model.safetensors");
        let expected = Checkpoint::open(&file, Some(4), 16).unwrap();
        let expected = logits(&expected.load(&device).unwrap());
        assert!(expected.iter().any(|logit| *logit != 0.0));
        for path in [folder.whole.path(), folder.path()] {
            let checkpoint = Checkpoint::open(path, None, 16).unwrap();
            assert_eq!(checkpoint.sizes, Sizes { own_head, ..SMALL });
            assert_eq!(logits(&checkpoint.load(&device).unwrap()), expected);
            let ends = checkpoint.ends(&device).unwrap();
            let by_blocks = tokens(&device).into_iter().flat_map(|batch| {
                let mut x = ends.embed(batch);
                for number in 0..2 {
                    x = checkpoint.block(number, &device).unwrap().forward(x);
                }
                values(ends.head(x))
            });
            near(&expected, &by_blocks.collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_block_opens_its_shards_alone() {
    let device = Device::flex();
    let folder = Folder::new(false);
    let checkpoint = folder.open();
    // Block 0 is in the shards 1 and 2, block 1 in 3, what is around them in 1.
    fs::remove_file(folder.shard_path(3)).unwrap();
    checkpoint.block(0, &device).unwrap();
    fs::remove_file(folder.shard_path(2)).unwrap();
    checkpoint.ends(&device).unwrap();
    for (number, shard) in [(0, 2), (1, 3)] {
        let Err(error) = checkpoint.block(number, &device) else {
            panic!("block {number} is in shard {shard}, which is not there");
        };
        assert_says!(error, &shard_name(shard));
    }
}

#[test]
fn a_tied_head_is_the_embedding_even_where_another_one_is_stored() {
    let device = Device::flex();
    let folder = Folder::new(true);
    let own = logits(&folder.open().load(&device).unwrap());
    folder.set("tie_word_embeddings", json!(true));
    let checkpoint = folder.open();
    assert!(!checkpoint.sizes.own_head);
    assert_ne!(logits(&checkpoint.load(&device).unwrap()), own);
    let folder = Folder::new(false);
    folder.set("tie_word_embeddings", json!(false));
    assert_says!(folder.refused(None), "lm_head.weight");
}

#[test]
fn rotations_and_norms_are_those_of_the_configuration() {
    let folder = Folder::new(false);
    folder.configure(|config| {
        config["rope_theta"] = json!(500000);
        config["rms_norm_eps"] = json!(1e-3);
    });
    let sizes = folder.open().sizes;
    assert_eq!((sizes.rope_theta, sizes.norm_epsilon), (5e5, 1e-3));
    // Nothing said: as transformers takes it.
    folder.configure(|config| {
        let config = config.as_object_mut().unwrap();
        for key in ["rope_theta", "rms_norm_eps", "rope_scaling"] {
            config.remove(key);
        }
    });
    let sizes = folder.open().sizes;
    assert_eq!((sizes.rope_theta, sizes.norm_epsilon), (1e4, 1e-6));
    // As transformers 5 writes it.
    folder.configure(|config| {
        let config = config.as_object_mut().unwrap();
        config.remove("rope_theta");
        config.remove("rope_scaling");
        let rope = json!({ "rope_type": "default", "rope_theta": 2e4 });
        config.insert("rope_parameters".into(), rope);
    });
    let sizes = folder.open().sizes;
    assert_eq!((sizes.rope_theta, sizes.rope_scaling), (2e4, None));
}

#[test]
fn options_that_say_something_else_than_the_configuration_are_refused() {
    let folder = Folder::new(false);
    let refused = |theta, epsilon| match folder.open().with_options(theta, epsilon) {
        Ok(_) => panic!("it was taken"),
        Err(error) => error.to_string(),
    };
    for (error, words) in [
        (
            folder.refused(Some(8)).to_string(),
            ["`num_attention_heads` is 4", "--heads is 8"],
        ),
        (
            refused(Some(5e5), None),
            ["`rope_theta` is 10000", "--rope-theta is 500000"],
        ),
        (
            refused(None, Some(0.25)),
            ["`rms_norm_eps` is 0.00001", "--norm-eps is 0.25"],
        ),
    ] {
        for word in ["config.json"].into_iter().chain(words) {
            assert_says!(error, word);
        }
    }
    let same = Checkpoint::open(folder.path(), Some(4), 16).unwrap();
    same.with_options(Some(1e4), Some(1e-5)).unwrap();
    // Where the configuration says nothing, the option does.
    folder.set("rope_theta", json!(null));
    let said = folder.open().with_options(Some(5e5), None).unwrap();
    assert_eq!(said.sizes.rope_theta, 5e5);
}

#[test]
fn configurations_of_other_networks_are_refused_by_what_they_say() {
    let folder = Folder::new(false);
    for (key, value, word) in [
        ("model_type", json!("mistral"), "mistral"),
        (
            "architectures",
            json!(["LlamaForSequenceClassification"]),
            "LlamaForSeq",
        ),
        ("hidden_act", json!("gelu"), "gelu"),
        ("attention_bias", json!(true), "true"),
        ("mlp_bias", json!(true), "true"),
        ("rope_theta", json!(-1), "-1"),
        ("rms_norm_eps", json!(0), "0"),
        (
            "rope_scaling",
            json!({ "type": "linear", "factor": 2.0 }),
            "linear",
        ),
        (
            "rope_scaling",
            json!({ "rope_type": "yarn", "factor": 2.0 }),
            "yarn",
        ),
        ("rope_scaling", json!({ "factor": 2.0 }), "none"),
        (
            "quantization_config",
            json!({ "quant_method": "gptq", "bits": 4 }),
            "from floats",
        ),
        (
            "rope_scaling",
            json!({ "rope_type": "llama3", "factor": 8.0 }),
            "llama3",
        ),
    ] {
        folder.set(key, value);
        let error = folder.refused(None);
        let said = error.to_string();
        let CheckpointError::Unsupported { key: found, .. } = error else {
            panic!("{said}");
        };
        assert_eq!(found, key);
        for word in ["config.json", key, word] {
            assert_says!(said, word);
        }
    }
    // Sizes that the weights do not have.
    for (key, value, found) in [
        ("num_key_value_heads", 4, "2"),
        ("num_hidden_layers", 3, "2"),
        ("hidden_size", 32, "16"),
        ("intermediate_size", 10, "20"),
        ("vocab_size", 25, "24"),
        ("head_dim", 8, "4"),
    ] {
        folder.set(key, json!(value));
        let said = folder.refused(None).to_string();
        for word in ["config.json", key, &value.to_string(), found] {
            assert_says!(said, word);
        }
    }
}

#[test]
fn folders_that_are_damaged_or_reach_outside_are_refused() {
    let folder = Folder::new(false);
    let sound = folder.index();
    let tensor = "model.norm.weight".to_string();
    let refused_with = |shard: &str| {
        let mut index = sound.clone();
        index.insert(tensor.clone(), shard.to_string());
        folder.write_index(&index);
        folder.refused(None)
    };
    let index = folder.path().join(INDEX);
    for shard in [
        "../x.safetensors",
        "/x.safetensors",
        "a/b.safetensors",
        "..",
        "",
    ] {
        let (index, shard) = (index.clone(), shard.to_string());
        assert_eq!(
            refused_with(&shard),
            CheckpointError::Outside { index, shard }
        );
    }
    let shard = "model-00004-of-00003.safetensors".to_string();
    assert_eq!(
        refused_with(&shard),
        CheckpointError::MissingShard {
            index: index.clone(),
            shard
        }
    );
    let shard = shard_name(2);
    assert_eq!(
        refused_with(&shard),
        CheckpointError::Misplaced {
            index: index.clone(),
            tensor: tensor.clone(),
            shard
        }
    );
    // The file of the whole model, as a shard.
    let whole = folder.whole.path().join("model.safetensors");
    fs::copy(whole, folder.shard_path(3)).unwrap();
    folder.write_index(&sound);
    let error = folder.refused(None);
    assert_matches!(error, CheckpointError::Twice { .. });

    let cut = |file: &Path| {
        let bytes = fs::read(file).unwrap();
        fs::write(file, &bytes[..bytes.len() / 2]).unwrap();
        let error = folder.refused(None);
        let said = error.to_string();
        let CheckpointError::Unreadable { file: found, .. } = error else {
            panic!("{said}");
        };
        assert_eq!(found, file);
    };
    // In the middle of its tensors, and no such file at all.
    cut(&folder.shard_path(3));
    fs::write(folder.shard_path(3), [7_u8; 20]).unwrap();
    cut(&folder.shard_path(3));
    cut(&index);
    fs::remove_file(&index).unwrap();
    assert_matches!(folder.refused(None), CheckpointError::NoWeights { .. });
    let whole = folder.whole.path().join("model.safetensors");
    fs::copy(whole, folder.path().join("model.safetensors")).unwrap();
    cut(&folder.path().join("config.json"));
}

#[test]
fn sequences_that_are_longer_than_those_of_the_model_are_refused() {
    let folder = Folder::new(false);
    folder.set("max_position_embeddings", json!(15));
    assert_says!(
        folder.refused(None),
        "config.json",
        "`max_position_embeddings` is 15",
        "16 positions"
    );
    Checkpoint::open(folder.path(), None, 15).unwrap();
    folder.set("max_position_embeddings", json!(null));
    assert_eq!(folder.open().limit, None);
    // What a file by itself says in its metadata counts as much.
    let bytes = fs::read(folder.whole.path().join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let said = HashMap::from([("max_seq_len".to_string(), "15".to_string())]);
    let (_folder, alone) = scratch("model.safetensors");
    safetensors::serialize_to_file(file.tensors(), Some(said), &alone).unwrap();
    let refused = Checkpoint::open(&alone, Some(4), 16).map(drop);
    let limit = Checkpoint::open(&alone, Some(4), 15).map(|found| found.limit);
    assert_says!(refused.unwrap_err(), "`max_seq_len` is 15");
    assert_eq!(limit.unwrap(), Some(15));
}

/// The configuration that a checkpoint gives a folder, with the files beside it.
fn written(checkpoint: &Checkpoint, before_the_end: impl Fn()) -> (Value, Vec<String>) {
    let parent = tempfile::tempdir().unwrap();
    let to = parent.path().join("written");
    let sizes = checkpoint.sizes;
    let mut writer = Pretrained::create(&to, false, &sizes, Some(checkpoint)).unwrap();
    let model = checkpoint.load(&Device::flex()).unwrap();
    before_the_end();
    writer.add(&model, None).unwrap();
    writer.finish().unwrap();
    let config = fs::read(to.join("config.json")).unwrap();
    let names = fs::read_dir(&to).unwrap();
    let mut names: Vec<String> = names
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    (serde_json::from_slice(&config).unwrap(), names)
}

#[test]
fn a_file_is_read_with_the_configuration_beside_it() {
    let folder = Folder::new(false);
    let beside = folder.whole.path().join("config.json");
    let mut config = folder.config.clone();
    config["rope_theta"] = json!(500000);
    config["eos_token_id"] = json!(7);
    fs::write(&beside, config.to_string()).unwrap();
    let file = folder.whole.path().join("model.safetensors");
    let checkpoint = Checkpoint::open(&file, None, 16).unwrap();
    assert_eq!(
        (checkpoint.sizes.heads, checkpoint.sizes.rope_theta),
        (4, 5e5)
    );
    let (config, _) = written(&checkpoint, || ());
    for (key, value) in [
        ("rope_theta", json!(500000)),
        ("eos_token_id", json!(7)),
        ("max_position_embeddings", json!(16)),
        ("dtype", json!("float32")),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    // One that is not a Llama's is not passed over.
    fs::write(&beside, json!({ "model_type": "gemma" }).to_string()).unwrap();
    let Err(error) = Checkpoint::open(&file, Some(4), 16) else {
        panic!("a file of another network was taken");
    };
    assert_says!(error, "gemma");
    // By itself: the longest window is no limit of the model.
    fs::remove_file(&beside).unwrap();
    let alone = Checkpoint::open(&file, Some(4), 16).unwrap();
    assert_eq!(alone.sizes.rope_theta, 1e4);
    assert_eq!(written(&alone, || ()).0["max_position_embeddings"], 2048);
}

/// The folder may be gone when the last block is done.
#[test]
fn what_lies_beside_the_weights_is_read_before_the_first_of_them() {
    let folder = Folder::new(false);
    let beside = ["config.json", "tokenizer.json"].map(|name| folder.path().join(name));
    fs::write(&beside[1], "{}").unwrap();
    let checkpoint = folder.open();
    let (config, names) = written(&checkpoint, || {
        beside
            .iter()
            .for_each(|file| fs::remove_file(file).unwrap());
    });
    assert_eq!(config["rms_norm_eps"], 1e-5);
    assert_eq!(
        names,
        ["config.json", "model.safetensors", "tokenizer.json"]
    );
}

/// The formula as it was published, branch by branch, in F64.
fn published(frequency: f64) -> f64 {
    let (factor, low, high, positions) = (8.0, 1.0, 4.0, 8192.0);
    let wavelength = std::f64::consts::TAU / frequency;
    if wavelength < positions / high {
        frequency
    } else if wavelength > positions / low {
        frequency / factor
    } else {
        let smooth = (positions / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

#[test]
fn rotations_of_llama_3_1_are_scaled_as_published() {
    let device = Device::flex();
    let folder = Folder::new(false);
    let mut scaling = json!({
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    folder.set("rope_scaling", scaling.clone());
    let expected = RopeScaling {
        factor: 8.0,
        low: 1.0,
        high: 4.0,
        positions: 8192.0,
    };
    let found = folder.open().sizes.rope_scaling.unwrap();
    assert_eq!(found, expected);

    // The 64 frequencies of a head of Llama 3.1, of which some are in each branch.
    let frequencies = (0..64).map(|index| 5e5_f64.powf(-f64::from(index) / 64.0));
    let frequencies: Vec<f64> = frequencies.collect();
    let floats: Vec<f32> = frequencies.iter().map(|f| *f as f32).collect();
    let floats = Tensor::<1>::from_data(TensorData::new(floats, [64]), &device);
    let mut branches = [0; 3];
    for (frequency, found) in frequencies.iter().zip(values(found.scaled(floats))) {
        let expected = published(*frequency);
        // A few roundings of F32, that of the turns weighed against `1 / factor`.
        let off = (f64::from(found) - expected).abs() / expected;
        assert!(off < 2e-6, "{found} instead of {expected}");
        let ratio = expected / frequency;
        branches[usize::from(ratio < 1.0) + usize::from(ratio <= 0.125)] += 1;
    }
    assert!(branches.iter().all(|count| *count > 0), "{branches:?}");

    // And they are those of the model: 64 positions slow its second frequency down.
    folder.configure(|_| ());
    let plain = logits(&folder.open().load(&device).unwrap());
    scaling["original_max_position_embeddings"] = json!(64);
    folder.set("rope_scaling", scaling);
    assert_ne!(logits(&folder.open().load(&device).unwrap()), plain);
}
