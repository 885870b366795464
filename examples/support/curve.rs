//! Curves over training steps, as CSV and as SVG.

use std::fmt::Write;
use std::path::Path;

use plotters::prelude::*;

/// One line of a figure.
#[derive(Debug, Clone)]
pub(crate) struct Curve {
    pub(crate) name: String,
    /// (step, value)
    pub(crate) points: Vec<(usize, f64)>,
}

/// Writes the curves as `curve,step,value` rows.
pub(crate) fn write_csv(path: &Path, curves: &[Curve]) -> Result<(), String> {
    let mut csv = String::from("curve,step,value\n");
    for curve in curves {
        for (step, value) in &curve.points {
            let _ = writeln!(csv, "{},{step},{value}", curve.name);
        }
    }
    std::fs::write(path, csv).map_err(|error| failed(path, error))
}

/// Draws the curves over the step.
pub(crate) fn write_svg(
    path: &Path,
    title: &str,
    value: &str,
    curves: &[Curve],
) -> Result<(), String> {
    write_svg_over(path, title, "step", value, curves)
}

/// Draws the curves over whatever their steps are. The value axis is logarithmic; base 2 has ticks where plotters'
/// own, base 10, would have one or none.
pub(crate) fn write_svg_over(
    path: &Path,
    title: &str,
    step: &str,
    value: &str,
    curves: &[Curve],
) -> Result<(), String> {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let finite = || {
        points()
            .map(|(_, value)| *value)
            .filter(|value| value.is_finite())
    };
    let first_step = points().map(|(step, _)| *step).min().unwrap_or(0);
    let first_step = if step == "step" { 0 } else { first_step };
    let last_step = points().map(|(step, _)| *step).max().unwrap_or(1);
    let lowest = finite().fold(f64::INFINITY, f64::min).max(1e-9);
    let highest = finite().fold(lowest * 1.1, f64::max);

    let root = SVGBackend::new(path, (860, 520)).into_drawing_area();
    root.fill(&WHITE).map_err(|error| failed(path, error))?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(
            first_step..last_step.max(first_step + 1),
            (0.95 * lowest).log2()..(1.2 * highest).log2(),
        )
        .map_err(|error| failed(path, error))?;
    chart
        .configure_mesh()
        .x_desc(step)
        .y_desc(value)
        .y_label_formatter(&|log2| format!("{:.2}", log2.exp2()))
        .draw()
        .map_err(|error| failed(path, error))?;
    for (index, curve) in curves.iter().enumerate() {
        let style = Palette99::pick(index).stroke_width(2);
        let line = curve
            .points
            .iter()
            .filter(|(_, value)| value.is_finite())
            .map(|(step, value)| (*step, value.log2()));
        chart
            .draw_series(LineSeries::new(line, style))
            .map_err(|error| failed(path, error))?
            .label(&curve.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()
        .map_err(|error| failed(path, error))?;
    root.present().map_err(|error| failed(path, error))
}

fn failed(path: &Path, error: impl std::fmt::Display) -> String {
    format!("cannot write {}: {error}", path.display())
}
