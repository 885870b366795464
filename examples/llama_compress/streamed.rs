//! One block in memory at a time: loaded, compressed, evaluated, written, dropped.

use std::cell::RefCell;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_lean::oneshot::{Compressed, OneShot, Preset, Report};

use super::checkpoint::Checkpoint;
use super::cli::Cli;
use super::evaluate::{batches, likelihoods, perplexity_of};
use super::llama::{Llama, LoneBlock};
use super::pretrained::Pretrained;
use super::rows::{Measured, Row, Rows};
use super::support::PeakMemory;
use super::{Text, calibration_batch, one_shot, with_codes};

/// What arrives at a block for each batch of windows.
type Arriving = Vec<Tensor<3>>;

pub(crate) fn run(
    cli: &Cli,
    folder: &Path,
    checkpoint: &Checkpoint,
    text: &Text,
    (name, preset): (String, Preset),
    mut pretrained: Option<Pretrained>,
    device: &Device,
) -> Result<(), Box<dyn Error>> {
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    if folder.join("manifest.json").exists() {
        let why = "is the state folder of a run: name another one for the compressed blocks";
        return Err(format!("{} {why}", folder.display()).into());
    }
    // Without the head, which is in no block.
    let preset = preset.with_skip(Vec::new());
    let Text { calibration, eval } = text;
    let windows = calibration.count();
    let layers = checkpoint.sizes.layers;

    let whole = PeakMemory::start();
    let start = Instant::now();
    let ends = checkpoint.ends(device)?;
    let embedded = |batches: &[(Tensor<2, Int>, Tensor<2, Int>)]| -> Arriving {
        let inputs = batches.iter().map(|(inputs, _)| inputs.clone());
        inputs.map(|tokens| ends.embed(tokens)).collect()
    };
    let eval = batches(eval, eval.count(), cli.batch, device);
    // Behind the blocks so far, the original ones and the compressed ones.
    let original = RefCell::new(embedded(&eval));
    let compressed = RefCell::new(embedded(&eval));
    let size = calibration_batch(cli, windows);
    let inputs = embedded(&batches(calibration, windows, size, device));

    let memory = RefCell::new(PeakMemory::start());
    let blocks = (0..layers).map(|number| -> Result<_, Box<dyn Error>> {
        memory.replace(PeakMemory::start());
        let block = checkpoint.block(number, device)?;
        through(&block, &mut original.borrow_mut());
        Ok((format!("layers.{number}"), block))
    });
    let mut bytes = 4 * ends.num_params();
    // Beginning a block forgets the peak so far.
    let mut peak = whole.bytes();
    let store = |number: usize, done: Compressed<LoneBlock>| -> Result<(), Box<dyn Error>> {
        let file = folder.join(format!("block-{number:04}.safetensors"));
        done.save(&file)?;
        let in_use = match &preset.activations {
            None => done.model.clone(),
            Some(rounded) => done.clone().prepare(Some(rounded))?.model,
        };
        through(&in_use, &mut compressed.borrow_mut());
        if let Some(folder) = &mut pretrained {
            folder.add(&with_codes(&done, &preset, in_use)?, Some(number))?;
        }
        let weights: usize = done.report.layers.iter().map(|layer| layer.weights).sum();
        bytes += 4 * (done.model.num_params() - weights) + done.report.bytes();
        peak = peak.max(whole.bytes());
        let block = &done.report.blocks[0];
        println!(
            "layers.{number}: {:.1} s, {} bytes of memory at most, {} of XᵀX and XᵀY",
            block.seconds,
            memory.borrow().bytes().unwrap_or(0),
            block.gram_bytes
        );
        Ok(())
    };
    one_shot(cli, OneShot::new(preset.clone())).compress_blocks(
        inputs,
        blocks,
        |block, x| block.forward(x),
        store,
    )?;
    let seconds = start.elapsed().as_secs_f64();
    let around = Compressed {
        model: ends.clone(),
        report: Report::default(),
        weights: Vec::new(),
    };
    around.save(folder.join("ends.safetensors"))?;
    if let Some(mut folder) = pretrained {
        folder.add(&ends, None)?;
        folder.finish()?;
    }
    let perplexity = |arriving: RefCell<Arriving>| perplexity(&ends, arriving.into_inner(), &eval);
    let not_generated = |perplexity: f64| Measured {
        perplexity,
        rate: None,
    };
    let original = not_generated(perplexity(original));
    let title = format!("Compressed on {windows} windows, one of {layers} blocks at a time");
    let mut rows = Rows::new(title, original);
    let row = Row {
        compressed: not_generated(perplexity(compressed)),
        engine: None,
        bytes,
        seconds,
        peak,
    };
    rows.push(&name, &preset, &row);
    Ok(rows.publish(cli.json.as_deref())?)
}

/// From what arrives at a block to what arrives at the next.
fn through(block: &LoneBlock, arriving: &mut Arriving) {
    for x in arriving {
        *x = block.forward(x.clone());
    }
}

fn perplexity(
    ends: &Llama,
    arriving: Arriving,
    batches: &[(Tensor<2, Int>, Tensor<2, Int>)],
) -> f64 {
    let parts = arriving.into_iter().zip(batches);
    let parts = parts.flat_map(|(x, (_, targets))| likelihoods(ends.head(x), targets.clone()));
    perplexity_of(&parts.collect::<Vec<_>>())
}
