//! What the examples read: the embedded digits, MNIST files, sound or damaged, checkpoints of
//! Burn's Learner, and options.

// The examples use more of these modules than this test does.
#[allow(dead_code)]
#[path = "../../benches/chita/options.rs"]
mod options;
#[path = "../../examples/support/mod.rs"]
mod support;

use std::fs;
use std::io::Write;
use std::path::Path;

use burn::tensor::Device;
use burn_lean::prune::PruneError;
use clap::Parser;
use flate2::Compression;
use flate2::write::GzEncoder;
use support::learner_checkpoint::{self, MissingCheckpoint};
use support::{IdxError, ImageSet};
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
    assert!(matches!(error, IdxError::Missing { .. }), "{error}");
    assert!(error.to_string().contains("t10k-labels-idx1-ubyte.gz"));
}

#[test]
fn a_cut_gzip_file_is_unreadable() {
    let dir = mnist(3, 4);
    let path = dir.path().join("train-images-idx3-ubyte");
    fs::remove_file(&path).unwrap();
    fs::write(path.with_extension("gz"), [0x1f, 0x8b, 8]).unwrap();
    let error = load(&dir);
    assert!(matches!(error, IdxError::Unreadable { .. }), "{error}");
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
    assert!(
        matches!(
            error,
            IdxError::Magic { found: 0x0801, .. } | IdxError::Size { .. }
        ),
        "{error}"
    );
}

#[test]
fn a_cut_file_gives_both_sizes() {
    let dir = mnist(3, 4);
    let path = dir.path().join("train-images-idx3-ubyte");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let error = load(&dir);
    assert!(
        matches!(
            error,
            IdxError::Size {
                expected: 64,
                found: 63,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_label_that_is_no_digit_is_refused() {
    let dir = mnist(3, 4);
    let path = dir.path().join("train-labels-idx1-ubyte");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() = 10;
    fs::write(&path, bytes).unwrap();
    let error = load(&dir);
    assert!(
        matches!(
            error,
            IdxError::Label {
                index: 2,
                label: 10,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn images_and_labels_must_be_as_many() {
    let dir = mnist(3, 4);
    write(dir.path(), "train-labels-idx1-ubyte", 0x0801, &[2]);
    let error = load(&dir);
    assert!(
        matches!(
            error,
            IdxError::Counts {
                images: 3,
                labels: 2,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_side_that_four_does_not_divide_is_refused() {
    let error = load(&mnist(3, 5));
    assert!(
        matches!(
            error,
            IdxError::Shape {
                height: 5,
                width: 5,
                ..
            }
        ),
        "{error}"
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
    let text = check(0).unwrap_err().to_string();
    assert!(text.contains("model-0.bpk is missing"), "{text}");
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
        "--l2=-1",
        "--l2=0",
        "--l2=NaN",
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
        assert!(
            matches!(error, PruneError::InvalidConfig { field: "base", .. }),
            "{error}"
        );
    }
    // With one run only the highest has to be above the base.
    assert_eq!(refused(&["--sparsity=0.05,0.5", "--one-run"]), Ok(()));
    assert_eq!(refused(&["--base=0"]), Err(kept(100)));
    assert_eq!(refused(&["--base=0", "--stages=1"]), Ok(()));
}
