"""The page of `--timeline out.html`: one canvas, no network."""

PAGE = """<!doctype html>
<meta charset="utf-8">
<title>@TITLE@</title>
<style>
body { font: 13px sans-serif; margin: 16px }
pre { background: #f4f4f4; padding: 8px }
i { display: inline-block; width: 10px; height: 10px }
</style>
<h3>@TITLE@</h3>
<canvas id="chart" width="1200" height="520"></canvas>
<div id="legend"></div>
<div id="here"></div>
<pre>@PEAK@</pre>
<script>
const data = @DATA@;
const canvas = document.getElementById("chart"), pen = canvas.getContext("2d");
const n = data.points.length, height = canvas.height - 14, top_gib = data.peak[1] * 1.1;
const x = i => i * canvas.width / n;
const y = gib => 14 + height - gib / top_gib * height;
data.points.forEach((point, i) => {
  let sum = 0;
  point.forEach((gib, k) => {
    pen.fillStyle = data.colours[k];
    pen.fillRect(x(i), y(sum + gib), canvas.width / n + 0.5, gib / top_gib * height);
    sum += gib;
  });
});
pen.fillStyle = pen.strokeStyle = "#000";
pen.font = "10px sans-serif";
data.phases.forEach(([i, label]) => {
  pen.fillRect(x(i), 0, 0.5, canvas.height);
  pen.save();
  pen.translate(x(i) + 3, 4);
  pen.rotate(Math.PI / 2);
  pen.fillText(label, 0, 0);
  pen.restore();
});
pen.beginPath();
pen.arc(x(data.peak[0]), y(data.peak[1]), 4, 0, 7);
pen.stroke();
data.categories.forEach((name, k) => {
  const entry = document.createElement("span"), box = document.createElement("i");
  box.style.background = data.colours[k];
  entry.append(box, " " + name + "  ");
  document.getElementById("legend").append(entry);
});
canvas.onmousemove = event => {
  const i = Math.min(n - 1, Math.max(0, Math.floor(event.offsetX * n / canvas.width)));
  const sum = data.points[i].reduce((a, b) => a + b, 0).toFixed(2);
  const parts = data.categories.map((name, k) => name + " " + data.points[i][k].toFixed(2)).join(", ");
  document.getElementById("here").textContent = sum + " GiB: " + parts;
};
</script>
"""
