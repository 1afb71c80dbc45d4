"use strict";
const player = document.getElementById("player");
const videos = [...player.querySelectorAll("video")];
const slider = document.getElementById("slider");
const button = document.getElementById("play");
const counter = document.getElementById("frame");
const stage = document.getElementById("stage");
const wipe = document.getElementById("wipe");
const marks = [...document.querySelectorAll("[data-path]")];
const frames = Number(player.dataset.frames);
const fps = Number(player.dataset.fps);
let playing = false;

// A dot on every path of the physics follows the frame.
function label(frame) {
  slider.value = frame;
  counter.textContent = `${frame + 1} / ${frames}`;
  for (const mark of marks) {
    const [x, y] = (mark.dataset.path.split(" ")[frame] || "").split(",");
    mark.setAttribute("visibility", y === undefined ? "hidden" : "visible");
    if (y !== undefined) { mark.setAttribute("cx", x); mark.setAttribute("cy", y); }
  }
}

// The middle of a frame: its edges belong to two frames.
function show(frame) {
  for (const video of videos) video.currentTime = (frame + 0.5) / fps;
  label(frame);
}

function current() {
  return Math.min(frames - 1, Math.floor(videos[0].currentTime * fps));
}

function follow() {
  if (!playing) return;
  const [leader, ...others] = videos;
  for (const video of others) {
    if (Math.abs(video.currentTime - leader.currentTime) > 0.5 / fps) video.currentTime = leader.currentTime;
  }
  label(current());
  requestAnimationFrame(follow);
}

function toggle(on) {
  playing = on;
  button.textContent = on ? "Pause" : "Play";
  for (const video of videos) {
    if (on) video.play().catch(() => { if (playing) toggle(false); });
    else video.pause();
  }
  if (on) follow();
  else show(current());
}

for (const video of videos) video.loop = true;
slider.addEventListener("input", () => {
  const wanted = Number(slider.value);
  if (playing) toggle(false);
  show(wanted);
});
button.addEventListener("click", () => toggle(!playing));
if (wipe) {
  const move = () => stage.style.setProperty("--wipe", `${wipe.value}%`);
  const keys = { ArrowLeft: -5, ArrowDown: -5, ArrowRight: 5, ArrowUp: 5 };
  wipe.addEventListener("input", move);
  // A pointer moves the edge finely, a key by a visible step.
  wipe.addEventListener("keydown", (event) => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    wipe.value = Number(wipe.value) + keys[event.key];
    move();
  });
  move();
}
show(Math.floor(frames / 2));
// Muted videos start by themselves; those of people who asked for less motion are stopped.
toggle(!matchMedia("(prefers-reduced-motion: reduce)").matches);
