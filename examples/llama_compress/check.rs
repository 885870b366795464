//! What will not come out well, found by sizes alone: before a weight is loaded.

use std::error::Error;

use burn_lean::oneshot::{OneShotError, Preset};

use super::llama::Sizes;

/// The module of a head that is a matrix of its own.
const HEAD: &str = "output";

/// A matrix that is compressed, and how many there are like it.
struct Matrix {
    path: &'static str,
    inputs: usize,
    outputs: usize,
    count: usize,
}

impl Matrix {
    fn weights(&self) -> usize {
        self.count * self.inputs * self.outputs
    }
}

fn matrices(preset: &Preset, sizes: &Sizes) -> Vec<Matrix> {
    let (width, hidden) = (sizes.width, sizes.hidden);
    let kv = width / sizes.heads * sizes.kv_heads;
    let of_block = [
        ("layers.0.attention.wq.weight", width, width),
        ("layers.0.attention.wk.weight", width, kv),
        ("layers.0.attention.wv.weight", width, kv),
        ("layers.0.attention.wo.weight", width, width),
        ("layers.0.feed_forward.w1.weight", width, hidden),
        ("layers.0.feed_forward.w2.weight", hidden, width),
        ("layers.0.feed_forward.w3.weight", width, hidden),
    ];
    let of_block = of_block.into_iter().map(|(path, inputs, outputs)| Matrix {
        path,
        inputs,
        outputs,
        count: sizes.layers,
    });
    let has_head = sizes.own_head && !preset.skip.iter().any(|path| path == HEAD);
    let head = has_head.then_some(Matrix {
        path: "output.weight",
        inputs: width,
        outputs: sizes.vocabulary,
        count: 1,
    });
    of_block.chain(head).collect()
}

/// Leaves a head that is a matrix of its own as it is, which is what readers of folders expect, unless it is
/// `asked` for.
///
/// # Errors
///
/// A head that is asked for, but is the embedding.
pub(crate) fn leave_head(preset: &mut Preset, sizes: &Sizes, asked: bool) -> Result<(), String> {
    match (sizes.own_head, asked) {
        (true, false) => preset.skip.push(HEAD.into()),
        (false, true) => {
            return Err(
                "--head: the head of this checkpoint is its embedding, which stays as it is: leave the \
                 option out"
                    .into(),
            );
        }
        _ => {}
    }
    Ok(())
}

/// Looks at all of it: presets with their names, `rows` of calibration, and the folder where one is written.
/// What is worth knowing before the run comes back, a line each.
///
/// # Errors
///
/// What [`layers`] and [`folder`] refuse.
pub(crate) fn check(
    presets: &[(String, Preset)],
    sizes: &Sizes,
    rows: usize,
    writes_folder: bool,
) -> Result<Vec<String>, Box<dyn Error>> {
    let mut lines = Vec::new();
    for (name, preset) in presets {
        layers(preset, sizes, rows)?;
        if writes_folder {
            let told = folder(preset, sizes)?.into_iter();
            lines.extend(told.map(|line| format!("{name}: {line}")));
        }
    }
    Ok(lines)
}

/// Refuses a pattern that does not divide the inputs of a layer, and fewer rows than a layer has inputs where
/// something is solved for.
pub(crate) fn layers(preset: &Preset, sizes: &Sizes, rows: usize) -> Result<(), OneShotError> {
    let matrices = matrices(preset, sizes);
    let mut matrices = matrices.iter();
    matrices.try_for_each(|one| preset.check_layer(one.path, one.inputs, rows))
}

/// What whoever is given the folder has to know.
///
/// # Errors
///
/// Groups that do not divide the inputs of most weights, which would be floats in it.
pub(crate) fn folder(preset: &Preset, sizes: &Sizes) -> Result<Vec<String>, String> {
    let Some(quantize) = &preset.quantize else {
        return Ok(Vec::new());
    };
    let mut lines: Vec<String> = readers(preset).map(String::from).into_iter().collect();
    let Some(group) = quantize.group else {
        return Ok(lines);
    };
    let matrices = matrices(preset, sizes);
    let is_ragged = |one: &&Matrix| one.inputs > group && !one.inputs.is_multiple_of(group);
    let ragged: Vec<&Matrix> = matrices.iter().filter(is_ragged).collect();
    if ragged.is_empty() {
        return Ok(lines);
    }
    let floats: usize = ragged.iter().map(|one| one.weights()).sum();
    let all: usize = matrices.iter().map(Matrix::weights).sum();
    let mut inputs: Vec<usize> = ragged.iter().map(|one| one.inputs).collect();
    inputs.sort_unstable();
    inputs.dedup();
    let inputs: Vec<String> = inputs.iter().map(usize::to_string).collect();
    // Smaller ones cost more in scales than the codes take.
    let shared = 1_usize << (sizes.width | sizes.hidden).trailing_zeros();
    let instead = match shared.min(1_usize << group.ilog2()) {
        fits @ 16.. => format!("take groups of {fits}, or none"),
        _ => "take none (a scale for each output)".into(),
    };
    let said = format!(
        "groups of {group} do not divide the {} inputs of layers, and the layout of the folder has no place for a \
         smaller one: {:.0} % of the weights become floats in F32 there{}",
        inputs.join(" and "),
        100.0 * floats as f64 / all as f64,
        match preset.activations {
            Some(_) => ", and the inputs of their layers are not rounded",
            None => "",
        }
    );
    // As many bytes as all of them in half precision.
    if 2 * floats > all {
        return Err(format!(
            "--pretrained: {said}, which is more than the checkpoint takes in half precision: {instead}"
        ));
    }
    lines.push(format!("{said}; {instead} to have codes"));
    Ok(lines)
}

/// Which programs read a folder of this grid, where it is not both Transformers and vLLM: by vLLM's source of
/// September 2026.
fn readers(preset: &Preset) -> Option<&'static str> {
    let quantize = preset.quantize.as_ref()?;
    let inputs = preset.activations.as_ref().map(|one| one.bits);
    let has_usual_groups = matches!(quantize.group, None | Some(32 | 64 | 128));
    match (quantize.bits, inputs) {
        (4, None) if has_usual_groups => None,
        (8, None) if has_usual_groups && quantize.symmetric => None,
        (_, None) => Some(
            "Transformers reads the folder; vLLM takes 4 bits, and 8 without zero points, in groups of 32, 64 or \
             128 or without: whether it takes others depends on its version and on the GPU",
        ),
        (8, Some(8)) if quantize.group.is_none() && quantize.symmetric => None,
        (4, Some(8)) if quantize.symmetric => {
            Some("Transformers reads the folder; vLLM has a kernel for it on CPUs alone")
        }
        _ => Some(
            "Transformers reads the folder, vLLM does not: with rounded inputs it takes 8-bit weights without \
             groups and zero points (w8a8), and on CPUs 4-bit ones without zero points (-sym)",
        ),
    }
}
