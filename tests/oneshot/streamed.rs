//! One block at a time gives what the whole model does.

use std::error::Error;
use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::graph::Pass;
use burn_lean::oneshot::{
    Activations, Compressed, OneShot, OneShotError, Order, Preset, Scaling, load_compressed,
};
use tempfile::TempDir;

use crate::checkpoint::Checkpoint;
use crate::checkpoints::{near, write};
use crate::llama::LoneBlock;
use crate::support::{on_each, parameters, tensor, values, with_numbers};
use crate::{small_llama, tokens};

/// The small model in a file.
fn file() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    write(&small_llama(&Device::flex()), &file, false);
    (folder, file)
}

#[test]
fn blocks_of_a_file_become_what_they_become_in_the_whole_model() {
    let (folder, file) = file();
    on_each(|device| {
        let checkpoint = Checkpoint::open(&file, None, 16).unwrap();
        let ends = checkpoint.ends(device).unwrap();
        let mut by_block: Preset = "sparse-2:4".parse().unwrap();
        by_block.order = Order::Block;
        for preset in [
            Preset::w8a16(),
            Preset::w4a16().with_group(8),
            Preset::w4a16()
                .with_group(8)
                .with_scaling(Some(Scaling::Awq)),
            "sparse-2:4".parse().unwrap(),
            by_block,
        ] {
            let whole = OneShot::new(preset.clone())
                .compress(small_llama(device), tokens(device), |model, x| {
                    model.forward(x)
                })
                .unwrap();
            let stored = |number: usize| folder.path().join(format!("{number}.safetensors"));
            let done = OneShot::new(preset.clone())
                .compress_blocks(
                    tokens(device).into_iter().map(|x| ends.embed(x)),
                    (0..2).map(|number| -> Result<_, OneShotError> {
                        let block = checkpoint.block(number, device).unwrap();
                        Ok((format!("layers.{number}"), block))
                    }),
                    |block, x| block.forward(x),
                    |number, block: Compressed<_>| block.save(stored(number)),
                )
                .unwrap();
            let name = preset.name();
            assert_eq!(done.report.blocks.len(), 2, "{name}");
            // To the nearest codes: no data are asked.
            let rows = if name == "w8a16" { 0 } else { 8 * 16 };
            assert_eq!(done.report.rows, rows, "{name}");
            assert_eq!(
                done.report.layers[7].path, "layers.1.block.attention.wq.weight",
                "{name}"
            );
            assert_eq!(done.report.bytes(), whole.report.bytes(), "{name}");
            assert_eq!(done.results.batches(), tokens(device).len());
            for (number, batch) in tokens(device).into_iter().enumerate() {
                let output = done.results.get(number, Pass::Replaced).unwrap();
                // Through what was written.
                let mut x = ends.embed(batch.clone());
                for number in 0..2 {
                    let block = checkpoint.block(number, device).unwrap();
                    let block = load_compressed(block, stored(number)).unwrap().model;
                    x = block.forward(x);
                }
                near(&values(x.clone()), &values(output));
                near(&values(whole.model.forward(batch)), &values(ends.head(x)));
            }
        }
    });
}

#[test]
fn blocks_that_round_their_inputs_are_those_of_the_whole_model() {
    let (_folder, file) = file();
    on_each(|device| {
        let checkpoint = Checkpoint::open(&file, None, 16).unwrap();
        let ends = checkpoint.ends(device).unwrap();
        let rounds = Activations::new(8);
        let whole = OneShot::new(Preset::w8a8())
            .compress(small_llama(device), tokens(device), |model, x| {
                model.forward(x)
            })
            .unwrap();
        let rounded = whole.clone().prepare(Some(&rounds)).unwrap().model;
        let embedded = tokens(device).into_iter().map(|x| ends.embed(x));
        let embedded: Vec<Tensor<3>> = embedded.collect();
        let mut arriving = embedded.clone();
        OneShot::new(Preset::w8a8())
            .compress_blocks(
                embedded,
                (0..2).map(|number| -> Result<_, Box<dyn Error>> {
                    let block = checkpoint.block(number, device)?;
                    Ok((format!("layers.{number}"), block))
                }),
                |block, x| block.forward(x),
                |_, done: Compressed<LoneBlock>| -> Result<(), Box<dyn Error>> {
                    assert!(done.report.layers.iter().any(|layer| !layer.unscaled));
                    let block = done.clone().prepare(Some(&rounds))?.model;
                    for x in &mut arriving {
                        *x = block.forward(x.clone());
                    }
                    Ok(())
                },
            )
            .unwrap();
        for (batch, x) in tokens(device).into_iter().zip(arriving) {
            let expected = values(rounded.forward(batch.clone()));
            let float = values(whole.model.forward(batch));
            let off = |other: &[f32]| {
                let pairs = expected.iter().zip(other);
                pairs.map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt()
            };
            let (streamed, float) = (off(&values(ends.head(x))), off(&float));
            assert!(streamed < 0.1 * float, "{streamed} {float}");
        }
    });
}

#[derive(Debug, PartialEq)]
enum Ended {
    Killed,
    OneShot(OneShotError),
}

impl From<OneShotError> for Ended {
    fn from(error: OneShotError) -> Self {
        Self::OneShot(error)
    }
}

#[derive(Module, Debug)]
struct Layer {
    linear: Linear,
}

/// Three layers, the first of which are compressed before the process ends.
fn layers(
    preset: &Preset,
    state: Option<&Path>,
    before_end: usize,
    device: &Device,
) -> Result<(Vec<Vec<f32>>, Vec<bool>), Ended> {
    let load = |number: usize| {
        let linear = LinearConfig::new(8, 8).init(device);
        let layer = with_numbers(Layer { linear }, number as u64);
        Ok((format!("layers.{number}"), layer))
    };
    let mut oneshot = OneShot::new(preset.clone());
    if let Some(folder) = state {
        oneshot = oneshot.with_state(folder);
    }
    let mut found = Vec::new();
    let x = tensor::<2>(9, [32, 8], device);
    let done = oneshot.compress_blocks(
        [x],
        (0..3).map(load),
        |layer, x| layer.linear.forward(x),
        |number, block| match number == before_end {
            true => Err(Ended::Killed),
            false => {
                found.push(parameters(&block.model).remove(0).values);
                Ok(())
            }
        },
    )?;
    let resumed = done.report.blocks.iter().map(|one| one.resumed);
    Ok((found, resumed.collect()))
}

#[test]
fn after_an_interruption_finished_blocks_are_not_solved_again() {
    let folder = tempfile::tempdir().unwrap();
    let preset = Preset::w4a16().with_group(4);
    let device = Device::flex();
    let (whole, _) = layers(&preset, None, 3, &device).unwrap();
    let ended = layers(&preset, Some(folder.path()), 1, &device);
    assert_eq!(ended, Err(Ended::Killed));
    let (found, resumed) = layers(&preset, Some(folder.path()), 3, &device).unwrap();
    assert_eq!(found, whole);
    assert_eq!(resumed, [true, true, false]);
}

/// Sums of another machine end in other last bits.
#[test]
fn another_device_goes_on_with_finished_blocks() {
    let preset = Preset::w4a16().with_group(4);
    on_each(|device| {
        let folder = tempfile::tempdir().unwrap();
        let ended = layers(&preset, Some(folder.path()), 1, &Device::flex());
        assert_eq!(ended, Err(Ended::Killed));
        let (_, resumed) = layers(&preset, Some(folder.path()), 3, device).unwrap();
        assert_eq!(resumed, [true, true, false]);
    });
}

#[test]
fn a_forward_pass_that_cannot_be_followed_is_named_with_its_block() {
    let device = Device::flex();
    let done = OneShot::new(Preset::w8a16()).compress_blocks(
        [tensor::<2>(9, [32, 8], &device)],
        (0..1).map(|_| -> Result<_, OneShotError> {
            Ok(("layers.0".into(), LinearConfig::new(8, 8).init(&device)))
        }),
        |layer: &Linear, x: Tensor<2>| {
            let y = layer.forward(x);
            // A number that a recording has not.
            let first = y.clone().max().into_scalar::<f32>();
            y * first
        },
        |_, _| Ok(()),
    );
    let error = done.map(|_| ()).unwrap_err();
    assert!(
        matches!(&error, OneShotError::Block { path, .. } if path == "layers.0"),
        "{error}"
    );
    assert_says!(error, "in block `layers.0`");
}

#[test]
fn what_is_wrong_in_a_block_is_said_with_its_name() {
    let device = Device::flex();
    let run = |preset: Preset, rows: usize| {
        let load = |number: usize| -> Result<_, OneShotError> {
            let linear = LinearConfig::new(8, 8).init(&device);
            Ok((format!("layers.{number}"), Layer { linear }))
        };
        let x = tensor::<2>(9, [rows, 8], &device);
        let done = OneShot::new(preset).compress_blocks(
            [x],
            (0..1).map(load),
            |layer, x| layer.linear.forward(x),
            |_, _| Ok(()),
        );
        done.map(|_| ()).unwrap_err()
    };
    let expected = OneShotError::TooFewRows {
        path: "layers.0.linear.weight".into(),
        rows: 5,
        inputs: 8,
    };
    assert_eq!(run(Preset::w4a16().with_group(4), 5), expected);
    let skipped = Preset::w4a16()
        .with_group(4)
        .with_skip(vec!["linear".into()]);
    let error = run(skipped, 32);
    assert!(
        matches!(&error, OneShotError::DoesNotFit { path, .. } if path == "layers.0"),
        "{error}"
    );
    let never = OneShot::new(Preset::w4a16().with_group(4)).compress_blocks(
        [tensor::<2>(9, [32, 8], &device)],
        (0..1).map(|number| -> Result<_, OneShotError> {
            let linear = LinearConfig::new(8, 8).init(&device);
            Ok((format!("layers.{number}"), Layer { linear }))
        }),
        |_, x| x * 2.0,
        |_, _| Ok(()),
    );
    let expected = OneShotError::NeverCalled {
        path: "layers.0".into(),
    };
    assert_eq!(never.map(|_| ()).unwrap_err(), expected);
    let named = Preset::w4a16()
        .with_group(4)
        .with_blocks(Some(vec!["linear".into()]));
    assert_matches!(
        run(named, 32),
        OneShotError::InvalidConfig {
            field: "blocks",
            ..
        }
    );
    let none = OneShot::new(Preset::w8a16()).compress_blocks(
        Vec::<Tensor<2>>::new(),
        (0..1).map(|_| -> Result<_, OneShotError> {
            Ok(("one".into(), LinearConfig::new(8, 8).init(&device)))
        }),
        |layer: &Linear, x| layer.forward(x),
        |_, _| Ok(()),
    );
    assert_matches!(none.unwrap_err(), OneShotError::Graph(_));
}
