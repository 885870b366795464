//! The picture of an alignment: what the network says at each moment of an utterance.

use std::path::Path;

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use crate::acoustic_model::{CLASSES, FRAMES_PER_STEP};
use crate::batches::BLANK;
use crate::decoding::collapse;
use crate::log_mel::{HOP, SAMPLE_RATE, WINDOW};
use crate::utterance::Utterance;

const SIZE: (u32, u32) = (1000, 560);
/// Height of the part with the sound.
const SOUND: i32 = 170;
/// Where the names of the curves begin.
const NAMES: i32 = 880;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Plane = Cartesian2d<RangedCoordf64, RangedCoordf64>;

/// Draws the sound and, below, the probability of the blank and of each symbol over time, for
/// `probabilities` `[steps, classes]`. Where a symbol is spoken is shaded.
pub(crate) fn write(
    path: &Path,
    utterance: &Utterance,
    probabilities: &[f32],
) -> Result<(), String> {
    draw(path, utterance, probabilities)
        .map_err(|error| format!("cannot draw {}: {error}", path.display()))
}

fn draw(
    path: &Path,
    utterance: &Utterance,
    probabilities: &[f32],
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let (plots, names) = root.split_horizontally(NAMES);
    let (upper, lower) = plots.split_vertically(SOUND);
    let seconds = utterance.samples.len() as f64 / f64::from(SAMPLE_RATE);

    draw_sound(&upper, utterance, seconds)?;
    let mut chart = ChartBuilder::on(&lower)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..seconds, 0.0..1.02)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc("time [s]")
        .y_desc("probability")
        .draw()?;
    shade(&mut chart, utterance, 0.0..1.02)?;
    let mut row = 0;
    for class in 0..CLASSES {
        let curve = probabilities.iter().skip(class).step_by(CLASSES);
        let points: Vec<(f64, f64)> = curve
            .enumerate()
            .map(|(step, probability)| (time(step), f64::from(*probability)))
            .filter(|(time, _)| *time <= seconds)
            .collect();
        let most = points.iter().map(|point| point.1).fold(0.0, f64::max);
        let style = color(class).stroke_width(if class == BLANK { 1 } else { 2 });
        chart.draw_series(LineSeries::new(points, style))?;
        // The others lie on the axis.
        if most > 0.1 {
            let name = match class {
                BLANK => "blank".to_string(),
                class => format!("“{}”", class - 1),
            };
            let height = SOUND + 30 + 22 * row;
            names.draw(&PathElement::new([(4, height), (28, height)], style))?;
            names.draw(&Text::new(name, (36, height - 7), ("sans-serif", 14)))?;
            row += 1;
        }
    }
    root.present()?;
    Ok(())
}

/// The middle of what a step sees: padded convolutions centre it on the first of its frames.
fn time(step: usize) -> f64 {
    (step * FRAMES_PER_STEP * HOP + WINDOW / 2) as f64 / f64::from(SAMPLE_RATE)
}

fn color(class: usize) -> RGBAColor {
    match class {
        BLANK => BLACK.mix(0.6),
        class => Palette99::pick(class - 1).to_rgba(),
    }
}

/// Highest and lowest sample of each 5 ms, and what is said.
fn draw_sound(
    area: &Area<'_>,
    utterance: &Utterance,
    seconds: f64,
) -> Result<(), Box<dyn std::error::Error>> {
    const PIECE: usize = 40;
    let loudest = utterance
        .samples
        .iter()
        .fold(0.0_f32, |most, sample| most.max(sample.abs()));
    let scale = 1.0 / f64::from(loudest.max(1e-9));
    let said: String = utterance.symbols.iter().map(usize::to_string).collect();
    let mut chart = ChartBuilder::on(area)
        .caption(format!("Alignment of “{said}”"), ("sans-serif", 18))
        .margin(12)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..seconds, -1.1..1.1)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .y_desc("sound")
        .y_labels(0)
        .draw()?;
    shade(&mut chart, utterance, -1.1..1.1)?;
    for (symbol, span) in utterance.symbols.iter().zip(&utterance.spans) {
        let place = (span.start as f64 / f64::from(SAMPLE_RATE) + 0.01, 1.1);
        let name = Text::new(symbol.to_string(), place, ("sans-serif", 15));
        chart.draw_series([name])?;
    }
    let lines = utterance
        .samples
        .chunks(PIECE)
        .enumerate()
        .map(|(index, piece)| {
            let time = (index * PIECE + PIECE / 2) as f64 / f64::from(SAMPLE_RATE);
            let [low, high] = piece.iter().fold([0.0_f64; 2], |[low, high], sample| {
                let sample = scale * f64::from(*sample);
                [low.min(sample), high.max(sample)]
            });
            PathElement::new([(time, low), (time, high)], BLACK.mix(0.7))
        });
    chart.draw_series(lines)?;
    Ok(())
}

/// Shades where each symbol is spoken, in its color.
fn shade(
    chart: &mut ChartContext<'_, SVGBackend<'_>, Plane>,
    utterance: &Utterance,
    height: std::ops::Range<f64>,
) -> Result<(), Box<dyn std::error::Error>> {
    let at = |sample: usize| sample as f64 / f64::from(SAMPLE_RATE);
    for (symbol, span) in utterance.symbols.iter().zip(&utterance.spans) {
        let corners = [(at(span.start), height.start), (at(span.end), height.end)];
        let style = color(symbol + 1).mix(0.15).filled();
        chart.draw_series([Rectangle::new(corners, style)])?;
    }
    Ok(())
}

/// A test string to show: one with the same symbol twice in a row, which only a blank between them
/// tells apart, and of these one of the longest; else the longest.
pub(crate) fn to_show(utterances: &[Utterance]) -> Option<&Utterance> {
    let repeats = |utterance: &&Utterance| {
        let classes: Vec<usize> = utterance.symbols.iter().map(|symbol| symbol + 1).collect();
        collapse(&classes).len() < classes.len()
    };
    let longest = |one: &&Utterance| one.symbols.len();
    let repeating = utterances.iter().filter(repeats).max_by_key(longest);
    repeating.or_else(|| utterances.iter().max_by_key(longest))
}
