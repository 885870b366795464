//! The figures of a report, as SVG.

use plotters::prelude::*;

use super::{LayerSqnr, Robustness, Side, Trust};
use crate::RecipeError;
use crate::check::percent_text;

const ORIGINAL: RGBColor = RGBColor(0x2c, 0x6f, 0xbb);
const COMPRESSED: RGBColor = RGBColor(0xd9, 0x5f, 0x02);
const GREY: RGBColor = RGBColor(0x88, 0x88, 0x88);

fn failed(error: impl std::fmt::Display) -> RecipeError {
    RecipeError::task(format!("a figure cannot be drawn: {error}"))
}

/// The reliability diagrams side by side: accuracy over confidence, below them how many examples.
pub(super) fn reliability(trust: &Trust) -> Result<String, RecipeError> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (860, 380)).into_drawing_area();
        root.fill(&WHITE).map_err(failed)?;
        let halves = root.split_evenly((1, 2));
        for (half, (side, color)) in halves
            .iter()
            .zip([(&trust.original, ORIGINAL), (&trust.compressed, COMPRESSED)])
        {
            diagram(half, side, color)?;
        }
        root.present().map_err(failed)?;
    }
    Ok(svg)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn diagram(area: &Area<'_>, side: &Side, color: RGBColor) -> Result<(), RecipeError> {
    let most = side.reliability.iter().map(|bin| bin.examples).max();
    let most = most.unwrap_or(1).max(1);
    let title = format!("{}: ECE {:.3}", side.stage, side.ece);
    let along = format!("confidence (grey: examples, at most {most})");
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 17))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(44)
        .build_cartesian_2d(0.0..1.0, 0.0..1.0)
        .map_err(failed)?;
    let label = |value: &f64| format!("{value:.1}");
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc(along)
        .y_desc("accuracy")
        .x_label_formatter(&label)
        .y_label_formatter(&label)
        .draw()
        .map_err(failed)?;
    let bins = side.reliability.len().max(1) as f64;
    for (index, bin) in side.reliability.iter().enumerate() {
        if bin.examples == 0 {
            continue;
        }
        let (left, right) = (index as f64 / bins, (index + 1) as f64 / bins);
        let bar = Rectangle::new(
            [(left, 0.0), (right, bin.accuracy)],
            color.mix(0.65).filled(),
        );
        // How many examples: a bar of its share below, grey.
        let share = 0.12 * bin.examples as f64 / most as f64;
        let count = Rectangle::new([(left, 0.0), (right, share)], GREY.mix(0.9).filled());
        let point = Circle::new((bin.confidence, bin.accuracy), 3, BLACK.filled());
        chart.draw_series([bar, count]).map_err(failed)?;
        chart.draw_series([point]).map_err(failed)?;
    }
    let diagonal = LineSeries::new([(0.0, 0.0), (1.0, 1.0)], BLACK);
    chart.draw_series(diagonal).map_err(failed)?;
    Ok(())
}

/// Pairs of bars: accuracy under each perturbation.
pub(super) fn robustness(trust: &Trust) -> Result<String, RecipeError> {
    let mut rows = vec![(
        "as they are".to_string(),
        trust.original.accuracy.value,
        trust.compressed.accuracy.value,
    )];
    rows.extend(trust.robustness.iter().map(
        |Robustness {
             perturbation,
             original,
             compressed,
         }| (perturbation.to_string(), *original, *compressed),
    ));
    let mut svg = String::new();
    {
        let height = 40 + 36 * rows.len() as u32;
        let root = SVGBackend::with_string(&mut svg, (860, height)).into_drawing_area();
        root.fill(&WHITE).map_err(failed)?;
        for (text, x, color) in [
            (&trust.original.stage, 150, ORIGINAL),
            (&trust.compressed.stage, 420, COMPRESSED),
        ] {
            let square = Rectangle::new([(x, 10), (x + 12, 22)], color.filled());
            root.draw(&square).map_err(failed)?;
            let text = Text::new(text.clone(), (x + 18, 9), ("sans-serif", 15));
            root.draw(&text).map_err(failed)?;
        }
        for (index, (name, original, compressed)) in rows.iter().enumerate() {
            let top = 36 + 36 * index as i32;
            let text = Text::new(name.clone(), (8, top + 6), ("sans-serif", 14));
            root.draw(&text).map_err(failed)?;
            for (offset, value, color) in [(0, original, ORIGINAL), (14, compressed, COMPRESSED)] {
                bar(&root, (150, top + offset), *value, color)?;
            }
        }
        root.present().map_err(failed)?;
    }
    Ok(svg)
}

/// A bar for a share, 600 wide for 1, with its percentage.
fn bar(
    root: &Area<'_>,
    (left, top): (i32, i32),
    value: f64,
    color: RGBColor,
) -> Result<(), RecipeError> {
    let right = left + (600.0 * value).round() as i32;
    let bar = Rectangle::new(
        [(left, top), (right.max(left + 1), top + 12)],
        color.filled(),
    );
    root.draw(&bar).map_err(failed)?;
    let text = format!("{} %", percent_text(value, 1));
    let text = Text::new(text, (right + 6, top), ("sans-serif", 12));
    root.draw(&text).map_err(failed)
}

/// One bar for each layer, 0 to 60 dB.
pub(super) fn layers(trust: &Trust) -> Result<String, RecipeError> {
    let mut svg = String::new();
    {
        let height = 20 + 20 * trust.layers.len().max(1) as u32;
        let root = SVGBackend::with_string(&mut svg, (860, height)).into_drawing_area();
        root.fill(&WHITE).map_err(failed)?;
        for (index, LayerSqnr { path, site, sqnr }) in trust.layers.iter().enumerate() {
            let top = 10 + 20 * index as i32;
            let name = match site.as_str() {
                "weight" => path.clone(),
                site => format!("{site} of {path}"),
            };
            let text = Text::new(name, (8, top), ("sans-serif", 13));
            root.draw(&text).map_err(failed)?;
            let right = 380 + (6.5 * sqnr.clamp(0.0, 60.0)).round() as i32;
            let corners = [(380, top + 1), (right.max(381), top + 13)];
            let color = match site.as_str() {
                "weight" => ORIGINAL,
                _ => COMPRESSED,
            };
            root.draw(&Rectangle::new(corners, color.filled()))
                .map_err(failed)?;
            let text = match *sqnr >= 200.0 {
                true => "equal".to_string(),
                false => format!("{sqnr:.1} dB"),
            };
            let text = Text::new(text, (right + 6, top), ("sans-serif", 13));
            root.draw(&text).map_err(failed)?;
        }
        root.present().map_err(failed)?;
    }
    Ok(svg)
}
