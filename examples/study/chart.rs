//! Charts, each as SVG and as PNG. The PNG's letters come from a font that is part of the program, so no font has to be installed.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::sync::Once;

use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

const SIZE: (u32, u32) = (860, 520);
const FONT: &str = "sans-serif";

/// Colours that people with colour blindness can tell apart (Okabe and Ito's, and some more).
const COLOURS: [RGBColor; 11] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(90, 90, 90),
    RGBColor(160, 120, 60),
    RGBColor(120, 60, 160),
    RGBColor(0, 0, 0),
    RGBColor(150, 150, 150),
];

/// What can be drawn on either backend.
pub trait Chart {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Result<()>
    where
        B::ErrorType: 'static;

    /// Writes `stem`.svg and `stem`.png.
    fn write(&self, stem: &Path) -> Result<()> {
        register_letters();
        let path = stem.with_extension("svg");
        let area = SVGBackend::new(&path, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        self.draw(&area)?;
        area.present().map_err(failed)?;
        self.write_png(stem)
    }

    /// Writes `stem.png` alone: what has a shape for every cell is large in the other format.
    fn write_png(&self, stem: &Path) -> Result<()> {
        register_letters();
        let mut pixels = vec![0; (SIZE.0 * SIZE.1 * 3) as usize];
        {
            let area = BitMapBackend::with_buffer(&mut pixels, SIZE).into_drawing_area();
            area.fill(&WHITE).map_err(failed)?;
            self.draw(&area)?;
            area.present().map_err(failed)?;
        }
        save(&stem.with_extension("png"), &pixels).with_context(|| format!("cannot write {}.png", stem.display()))
    }
}

fn register_letters() {
    static FONTS: Once = Once::new();
    FONTS.call_once(|| {
        // The font is a constant of a crate: a program whose font cannot be read could not have been tested.
        let font = register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
        assert!(font.is_ok(), "the built-in font cannot be read");
    });
}

/// A curve and its name.
#[derive(Clone, Debug)]
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
    /// A bound rather than something that could be run.
    pub bound: bool,
}

/// Curves over one pair of axes.
#[derive(Clone, Debug, Default)]
pub struct Lines {
    pub title: String,
    pub x: String,
    pub y: String,
    pub series: Vec<Series>,
}

impl Chart for Lines {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Result<()>
    where
        B::ErrorType: 'static,
    {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let (left, right) = points().fold((f64::MAX, f64::MIN), |(a, b), p| (a.min(p.0), b.max(p.0)));
        let top = points().fold(0.0f64, |top, p| top.max(p.1));
        anyhow::ensure!(left <= right, "there is nothing to draw in “{}”", self.title);
        let margin = ((right - left) * 0.03).max(0.5);
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, (FONT, 20))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(58)
            .build_cartesian_2d(left - margin..right + margin, 0.0..(top * 1.08).max(1e-3))
            .map_err(failed)?;
        let mesh = &mut chart.configure_mesh();
        let mesh = mesh.x_desc(&self.x).y_desc(&self.y).light_line_style(WHITE).label_style((FONT, 14));
        mesh.axis_desc_style((FONT, 16)).draw().map_err(failed)?;
        for (index, series) in self.series.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let style = colour.stroke_width(2);
            let legend = move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], style);
            let points = series.points.iter().copied();
            let drawn = match series.bound {
                true => chart.draw_series(DashedLineSeries::new(points.clone(), 6, 4, style)).map_err(failed)?,
                false => chart.draw_series(LineSeries::new(points.clone(), style)).map_err(failed)?,
            };
            drawn.label(&series.name).legend(legend);
            chart.draw_series(points.map(|point| Circle::new(point, 3, colour.filled()))).map_err(failed)?;
        }
        let mut labels = chart.configure_series_labels();
        let labels = labels.position(SeriesLabelPosition::UpperRight).background_style(WHITE.mix(0.85));
        labels.border_style(RGBColor(180, 180, 180)).label_font((FONT, 14)).draw().map_err(failed)
    }
}

/// A number from 0 to 1 for every row and column, as darkness.
#[derive(Clone, Debug, Default)]
pub struct Map {
    pub title: String,
    pub x: String,
    pub y: String,
    /// What a column stands for on the x axis.
    pub column_width: usize,
    pub rows: Vec<Vec<f64>>,
}

impl Chart for Map {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Result<()>
    where
        B::ErrorType: 'static,
    {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        anyhow::ensure!(columns > 0, "there is nothing to draw in “{}”", self.title);
        let width = self.column_width;
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, (FONT, 20))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(58)
            .build_cartesian_2d(0..columns * width, 0..self.rows.len())
            .map_err(failed)?;
        let mesh = &mut chart.configure_mesh();
        let mesh = mesh.x_desc(&self.x).y_desc(&self.y).disable_mesh().label_style((FONT, 14));
        mesh.axis_desc_style((FONT, 16)).draw().map_err(failed)?;
        let cells = self.rows.iter().enumerate().flat_map(|(row, values)| {
            values.iter().enumerate().map(move |(column, &value)| {
                let corners = [(column * width, row), ((column + 1) * width, row + 1)];
                Rectangle::new(corners, shade(value).filled())
            })
        });
        chart.draw_series(cells).map_err(failed)?;
        Ok(())
    }
}

/// From white over orange to dark blue.
fn shade(value: f64) -> RGBColor {
    let stops = [(255.0, 255.0, 255.0), (253.0, 184.0, 99.0), (178.0, 24.0, 43.0), (30.0, 10.0, 60.0)];
    let place = value.clamp(0.0, 1.0) * (stops.len() - 1) as f64;
    let index = (place as usize).min(stops.len() - 2);
    let (from, to, share) = (stops[index], stops[index + 1], place - index as f64);
    let mix = |a: f64, b: f64| (a + (b - a) * share).round() as u8;
    RGBColor(mix(from.0, to.0), mix(from.1, to.1), mix(from.2, to.2))
}

fn save(path: &Path, pixels: &[u8]) -> Result<()> {
    let mut encoder = png::Encoder::new(BufWriter::new(File::create(path)?), SIZE.0, SIZE.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_compression(png::Compression::Best);
    encoder.set_adaptive_filter(png::AdaptiveFilterType::Adaptive);
    encoder.write_header()?.write_image_data(pixels)?;
    Ok(())
}

/// plotters' errors hold references to the backend.
fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("cannot draw: {error}")
}
