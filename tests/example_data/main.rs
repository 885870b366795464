//! What the examples read: the embedded digits, MNIST files, sound or damaged, checkpoints of
//! Burn's Learner, pruning problems, and options.

#[macro_use]
#[path = "../support/asserts.rs"]
mod asserts;

// The examples use more of these modules than this test does.
#[allow(dead_code)]
#[path = "../../examples/llama_compress/checkpoint.rs"]
mod checkpoint;
#[allow(dead_code)]
#[path = "../../examples/llama_compress/evaluate.rs"]
mod evaluate;
#[allow(dead_code)]
#[path = "../../examples/llama_compress/llama.rs"]
mod llama;
#[allow(dead_code)]
#[path = "../../examples/llama_compress/cli.rs"]
mod llama_cli;
#[allow(dead_code)]
#[path = "../../benches/chita/options.rs"]
mod options;
#[allow(dead_code)]
#[path = "../../examples/llama_compress/own.rs"]
mod own;
#[path = "../../examples/llama_compress/pretrained.rs"]
mod pretrained;
#[allow(dead_code)]
#[path = "../../examples/chita_solve/problem_file.rs"]
mod problem_file;
#[allow(dead_code)]
#[path = "../../examples/prune_chita/options.rs"]
mod prune_options;
#[allow(dead_code)]
#[path = "../../examples/ptq_calibrate/options.rs"]
mod ptq_options;
#[allow(dead_code)]
#[path = "../../examples/recipe/data.rs"]
mod recipe_data;
#[path = "../../benches/oneshot/row.rs"]
mod row;
#[path = "../../examples/support/mod.rs"]
mod support;

use std::fs;
use std::io::Write;
use std::path::Path;

use burn::tensor::Device;
use burn_lean::prune::PruneError;
use burn_lean::quant::KvFormat;
use clap::Parser;
use flate2::Compression;
use flate2::write::GzEncoder;
use support::learner_checkpoint::{self, MissingCheckpoint};
use support::{IdxError, ImageSet, Images};
use tempfile::TempDir;

#[test]
fn digits_are_complete_and_scaled() {
    let digits = ImageSet::digits();
    assert_eq!((digits.train.len(), digits.test.len()), (1437, 360));
    let batches: Vec<_> = digits.train.ordered(1000, &Device::flex()).collect();
    assert_eq!(batches.len(), 2);
    assert_eq!(batches[1].images.dims(), [437, 1, 8, 8]);
    assert_eq!(batches[0].images.clone().max().into_scalar::<f32>(), 1.0);
    assert_eq!(batches[0].images.clone().min().into_scalar::<f32>(), 0.0);
    assert_eq!(batches[0].labels.clone().max().into_scalar::<i64>(), 9);
}

#[test]
fn shuffling_follows_the_seed() {
    let digits = ImageSet::digits();
    let labels = |seed| {
        let batch = digits.train.shuffled(seed, 100, &Device::flex()).next();
        batch.expect("there are images").labels.into_data()
    };
    assert_eq!(labels(1), labels(1));
    assert_ne!(labels(1), labels(2));
}

/// Else a run would go on with stages of other data.
#[test]
fn a_recipe_knows_its_data_by_pixels_and_labels() {
    let set = |pixel: f32, label: i64| {
        let images = |pixel, label| Images::new(vec![0.5, pixel], vec![1, label], 1, 1);
        ImageSet {
            name: "two pixels",
            train: images(0.25, 0),
            test: images(pixel, label),
        }
    };
    let table = recipe_data::TaskTable::default();
    let identity = |set: &ImageSet| serde_json::to_string(&table.identity(set)).unwrap();
    let known = identity(&set(0.75, 3));
    assert_eq!(identity(&set(0.75, 3)), known);
    assert_ne!(identity(&set(0.5, 3)), known);
    assert_ne!(identity(&set(0.75, 4)), known);
}

#[test]
fn plain_and_gzip_files_read_alike() {
    let dir = mnist(3, 4);
    let plain = ImageSet::load(Some(dir.path())).expect("the files are sound");
    for entry in fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        let mut gz = GzEncoder::new(Vec::new(), Compression::default());
        gz.write_all(&fs::read(&path).unwrap()).unwrap();
        let name = format!("{}.gz", path.display());
        fs::write(name, gz.finish().unwrap()).unwrap();
        fs::remove_file(path).unwrap();
    }
    let gz = ImageSet::load(Some(dir.path())).expect("the files are sound");
    let pixels = |set: &ImageSet| {
        let batch = set.train.ordered(3, &Device::flex()).next();
        batch.expect("there are images").images.into_data()
    };
    assert_eq!(pixels(&plain), pixels(&gz));
    assert_eq!(plain.test.len(), 3);
}

#[test]
fn a_missing_file_is_named() {
    let dir = mnist(3, 4);
    fs::remove_file(dir.path().join("t10k-labels-idx1-ubyte")).unwrap();
    let error = load(&dir);
    assert_matches!(error, IdxError::Missing { .. });
    assert!(error.to_string().contains("t10k-labels-idx1-ubyte.gz"));
}

#[test]
fn a_cut_gzip_file_is_unreadable() {
    let dir = mnist(3, 4);
    let path = dir.path().join("train-images-idx3-ubyte");
    fs::remove_file(&path).unwrap();
    fs::write(path.with_extension("gz"), [0x1f, 0x8b, 8]).unwrap();
    assert_matches!(load(&dir), IdxError::Unreadable { .. });
}

#[test]
fn labels_in_the_place_of_images_are_refused() {
    let dir = mnist(3, 4);
    let path = dir.path();
    fs::copy(
        path.join("train-labels-idx1-ubyte"),
        path.join("train-images-idx3-ubyte"),
    )
    .unwrap();
    let error = load(&dir);
    assert_matches!(
        error,
        IdxError::Magic { found: 0x0801, .. } | IdxError::Size { .. }
    );
}

#[test]
fn a_cut_file_gives_both_sizes() {
    let dir = mnist(3, 4);
    let path = dir.path().join("train-images-idx3-ubyte");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    assert_matches!(
        load(&dir),
        IdxError::Size {
            expected: 64,
            found: 63,
            ..
        }
    );
}

#[test]
fn a_label_that_is_no_digit_is_refused() {
    let dir = mnist(3, 4);
    let path = dir.path().join("train-labels-idx1-ubyte");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() = 10;
    fs::write(&path, bytes).unwrap();
    assert_matches!(
        load(&dir),
        IdxError::Label {
            index: 2,
            label: 10,
            ..
        }
    );
}

#[test]
fn images_and_labels_must_be_as_many() {
    let dir = mnist(3, 4);
    write(dir.path(), "train-labels-idx1-ubyte", 0x0801, &[2]);
    assert_matches!(
        load(&dir),
        IdxError::Counts {
            images: 3,
            labels: 2,
            ..
        }
    );
}

#[test]
fn a_side_that_four_does_not_divide_is_refused() {
    let error = load(&mnist(3, 5));
    assert_matches!(
        error,
        IdxError::Shape {
            height: 5,
            width: 5,
            ..
        }
    );
}

#[test]
fn a_checkpoint_to_resume_from_is_there_or_named() {
    let run = tempfile::tempdir().unwrap();
    let missing = |epoch, file: &str, kept: &[usize]| {
        Err(MissingCheckpoint {
            epoch,
            file: run.path().join("checkpoint").join(file),
            kept: kept.to_vec(),
        })
    };
    let check = |epoch| learner_checkpoint::check(run.path(), epoch);
    assert_eq!(check(2), missing(2, "model-2.bpk", &[]));

    let write = |name: &str| fs::write(run.path().join("checkpoint").join(name), []).unwrap();
    fs::create_dir(run.path().join("checkpoint")).unwrap();
    for name in ["model-2.bpk", "optim-2.bpk", "scheduler-2.bpk"] {
        write(name);
    }
    write("model-10.bpk");
    assert_eq!(check(2), Ok(()));
    assert_eq!(check(10), missing(10, "optim-10.bpk", &[2, 10]));
    assert_eq!(check(0), missing(0, "model-0.bpk", &[2, 10]));
    assert_says!(check(0).unwrap_err(), "model-0.bpk is missing");
}

fn load(dir: &TempDir) -> IdxError {
    ImageSet::load(Some(dir.path())).expect_err("the files are damaged")
}

/// A folder with four sound files of `n` images.
fn mnist(n: u32, side: u32) -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for part in ["train", "t10k"] {
        let images = format!("{part}-images-idx3-ubyte");
        let labels = format!("{part}-labels-idx1-ubyte");
        write(dir.path(), &images, 0x0803, &[n, side, side]);
        write(dir.path(), &labels, 0x0801, &[n]);
    }
    dir
}

fn write(dir: &Path, name: &str, magic: u32, dims: &[u32]) {
    let mut bytes: Vec<u8> = [magic]
        .iter()
        .chain(dims)
        .flat_map(|x| x.to_be_bytes())
        .collect();
    let elements: u32 = dims.iter().product();
    bytes.extend((0..elements).map(|element| (element % 10) as u8));
    fs::write(dir.join(name), bytes).expect("the folder can be written");
}

/// The options of the study of CHITA.
fn pruning(options: &[&str]) -> Result<options::Cli, clap::Error> {
    options::Cli::try_parse_from(["chita"].iter().chain(options))
}

/// A network takes minutes to train, and the first methods some more.
#[test]
fn options_that_pruning_would_refuse_are_refused_before_training() {
    for options in [
        "--ridge=-1",
        "--ridge=0",
        "--ridge=NaN",
        "--sparsity=1",
        "--stages=0",
    ] {
        assert!(pruning(&[options]).is_err(), "{options}");
    }
    let refused = |options: &[&str]| {
        let cli = pruning(options).unwrap();
        cli.check().unwrap();
        cli.check_sparsities(100)
    };
    assert_eq!(refused(&[]), Ok(()));
    let kept = |k| PruneError::KeptCount {
        k,
        parameters: 100,
        path: None,
    };
    let single = "--method=magnitude";
    assert_eq!(refused(&[single, "--sparsity=0.05,0.5"]), Ok(()));
    assert_eq!(refused(&[single, "--sparsity=0.5,0"]), Err(kept(100)));
    assert_eq!(refused(&[single, "--sparsity=0.5,0.999"]), Err(kept(0)));
    // Every sparsity is a run of chita++, which begins at the base.
    for options in [
        &["--sparsity=0.05,0.5"][..],
        &["--sparsity=0.5", "--base=0.6"],
    ] {
        let error = refused(options).unwrap_err();
        assert_matches!(error, PruneError::InvalidConfig { field: "base", .. });
    }
    // With one run only the highest has to be above the base.
    assert_eq!(refused(&["--sparsity=0.05,0.5", "--one-run"]), Ok(()));
    assert_eq!(refused(&["--base=0"]), Err(kept(100)));
    assert_eq!(refused(&["--base=0", "--stages=1"]), Ok(()));
}

#[test]
fn options_that_no_method_of_pruning_has_a_use_for_are_refused() {
    let check = |options: &str| {
        let options = ["prune_chita"].into_iter().chain(options.split(' '));
        let cli = prune_options::Cli::try_parse_from(options).map_err(|error| error.to_string())?;
        cli.check()
    };
    for options in [
        "--seed 1",
        "--method chita++ --stages 4",
        "--method magnitude,default",
        "--arch resnet8 --data d --cifar-files original",
    ] {
        assert_eq!(check(options), Ok(()), "{options}");
    }
    for (options, named) in [
        ("--method chita --stages 4", "--stages"),
        ("--data d --cifar-files original", "--cifar-files"),
        ("--sparsity 0.5,0", "--sparsity"),
        ("--sparsity 1", "--sparsity"),
    ] {
        let error = check(options).unwrap_err();
        assert!(error.contains(named), "{options}: {error}");
    }
    assert!(support::fraction("NaN").is_err());
    assert_eq!(support::fraction("0.9"), Ok(0.9));
}

#[test]
fn options_that_resnet8_has_no_use_for_are_refused() {
    let check = |options: &[&str]| {
        let fixed = [
            "ptq_calibrate",
            "--arch=resnet8",
            "--data=d",
            "--checkpoint=c",
        ];
        let cli = ptq_options::Cli::try_parse_from(fixed.iter().chain(options));
        cli.unwrap().check()
    };
    assert_eq!(check(&["--onnx=o", "--calibration=100"]), Ok(()));
    for option in [
        "--mode=static",
        "--weight-bits=8",
        "--activation-bits=8",
        "--rounding=auto",
        "--mixed",
        "--seed=42",
        "--output=o",
    ] {
        let error = check(&[option]).unwrap_err();
        let name = option.split('=').next().unwrap();
        assert_says!(error, name);
    }
    let calibration = |options: &[&str], images: usize| {
        let options = ["ptq_calibrate"].iter().chain(options);
        let cli = ptq_options::Cli::try_parse_from(options).unwrap();
        cli.calibration(images)
    };
    assert_eq!(calibration(&[], 100), Ok(100));
    assert_eq!(calibration(&[], 1000), Ok(512));
    assert_eq!(calibration(&["--calibration=100"], 100), Ok(100));
    let error = calibration(&["--calibration=101"], 100).unwrap_err();
    assert_says!(error, "at most 100");
}

/// Names of the methods that these options of `llama_compress` ask for, or what is wrong with them.
fn methods(options: &str) -> Result<Vec<String>, String> {
    let options = ["llama_compress"].into_iter().chain(options.split(' '));
    let cli = llama_cli::Cli::try_parse_from(options).map_err(|error| error.to_string())?;
    let presets = cli.presets()?.into_iter();
    Ok(presets.map(|(name, _)| name).collect())
}

#[test]
fn options_that_no_method_has_a_use_for_are_refused() {
    for (options, count) in [
        ("--steps=9", 1),
        ("--method gptq --bits 4 --group 32 --asymmetric", 1),
        ("--method magnitude --sparsity 0.3", 1),
        (
            "--method magnitude,wanda,sparsegpt,best-subset --sparsity 2:4",
            4,
        ),
        (
            "--method best-subset --sparsity 0.5 --group 32 --bits 4 --rounding joint",
            1,
        ),
        ("--method magnitude,gptq --group 32", 2),
        ("--method gptq --as-published --activation-order", 1),
        ("--preset w4a16-g32", 1),
    ] {
        assert_eq!(
            methods(options).map(|names| names.len()),
            Ok(count),
            "{options}"
        );
    }
    for (options, named) in [
        ("--preset w4a16-g32 --as-published", "--as-published"),
        ("--method gptq --activation-order", "--as-published"),
        (
            "--method rtn --as-published --activation-order",
            "--activation-order",
        ),
        ("--method magnitude --group 32", "--group"),
        ("--sparsity 0.5 --asymmetric", "--asymmetric"),
        ("--method wanda --rounding nearest", "--rounding"),
        ("--heads 4", "--checkpoint"),
        ("--head", "--checkpoint"),
        ("--checkpoint m --tokens t --stream f --head", "--stream"),
        ("--rope-theta 500000", "--checkpoint"),
        ("--checkpoint m --tokens t --steps 9", "--steps"),
    ] {
        let error = methods(options).unwrap_err();
        assert!(error.contains(named), "{options}: {error}");
    }
}

/// A resumed run shows what the blocks before it took.
#[test]
fn the_row_of_a_block_comes_back_from_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("row-0003.json");
    assert_eq!(row::BlockRow::load(&file), Ok(None));
    let written = row::BlockRow {
        seconds: 12.5,
        solve_seconds: 12.25,
        peak_bytes: Some(1 << 31),
        process_bytes: None,
        weights: 28_311_552,
        gram_bytes: 33_554_432,
        activations: 92_274_688,
        file_bytes: 3_981_312,
        relative_error: 0.015625,
    };
    written.save(&file).unwrap();
    assert_eq!(row::BlockRow::load(&file), Ok(Some(written)));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    fs::write(&file, b"{\"seconds\": 1").unwrap();
    assert_says!(row::BlockRow::load(&file).unwrap_err(), "row-0003.json");
}

#[test]
fn what_a_model_is_calibrated_on_it_is_not_evaluated_on() {
    let (calibration, eval) = own::windows();
    assert_eq!((calibration.count(), eval.count()), (40, 12));
    assert_eq!((calibration.length, eval.length), (64, 64));
}

#[test]
fn a_model_that_is_trained_here_generates_as_many_tokens_as_asked_for() {
    let device = Device::flex();
    let model = own::train(&own::sizes(257), 0, 1, &device).unwrap();
    let said = evaluate::speak(&model, 257, KvFormat::Float, &device);
    assert_eq!(said.tokens.len(), 258);
}

/// Names, the order of rotated features, and what the configuration says.
#[test]
fn a_folder_for_transformers_is_a_checkpoint_of_the_same_model() {
    let device = Device::flex();
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("model");
    let sizes = own::sizes(64);
    let model = own::train(&sizes, 2, 1, &device).unwrap();
    // What a killed run leaves.
    fs::create_dir(&folder).unwrap();
    for name in [
        "model-00001.safetensors",
        "model-00001-of-00002.safetensors",
    ] {
        fs::write(folder.join(name), b"cut").unwrap();
    }
    // Another program's, until it says that it is not.
    let create = |goes_on| pretrained::Pretrained::create(&folder, goes_on, &sizes, None);
    assert!(create(true).is_err());
    fs::write(folder.join("unfinished"), b"").unwrap();
    assert!(create(false).is_err());
    let mut writer = create(true).unwrap();
    writer.add(&model, None).unwrap();
    writer.finish().unwrap();
    assert!(!folder.join("unfinished").exists());
    let found = checkpoint::Checkpoint::open(&folder, None, sizes.positions).unwrap();
    assert_eq!(found.sizes, sizes);
    let found = found.load(&device).unwrap();
    let (windows, _) = own::windows();
    let tokens = evaluate::batches(&windows, 2, 2, &device)[0].0.clone();
    let logits = |model: &llama::Llama| model.forward(tokens.clone()).into_data();
    assert_eq!(logits(&found), logits(&model));
}

#[test]
fn a_problem_that_promises_more_numbers_than_it_has_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("problem.safetensors");
    let count = 1u64 << 40;
    let header = serde_json::json!({
        "gradients": { "dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4] },
        "weights": { "dtype": "F32", "shape": [count], "data_offsets": [4, 4 + 4 * count] },
    });
    let header = header.to_string();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(&file, [&length[..], header.as_bytes(), &[0; 8]].concat()).unwrap();
    let read = problem_file::read(&file, &Device::flex());
    assert_says!(read.map(drop).unwrap_err(), "it is cut");
}
